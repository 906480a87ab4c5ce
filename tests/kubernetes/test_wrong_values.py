"""A wrong value in a manifest is one line of cause and one of fix, which docs/deployment.md shows."""

import pytest

from oarlock.server.cli import serve
from oarlock.server.cli.main import main
from tests.kubernetes.manifests import ROOT

GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "oarlock-0.oarlock"}


def _not_started(*arguments, **options):
    raise AssertionError("a wrong value is found before any process starts")


@pytest.mark.parametrize(
    ("arguments", "environment", "status"),
    [
        (["--drain-timeout", "soon"], {}, 2),
        ([], {"OARLOCK_PROT": "8000"}, 3),
        ([], {"OARLOCK_API_KEY": ""}, 3),
        ([], {"OARLOCK_NODE_SECRET": "x" * 64}, 3),
    ],
)
def test_the_log_names_the_fault_and_what_to_do(arguments, environment, status, monkeypatch, capsys):
    monkeypatch.setattr(serve, "engine_processes", _not_started)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", *arguments]) == status
    cause, fix = (line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines())
    assert f"`{cause}` / `{fix.split(';')[0]}" in (ROOT / "docs" / "deployment.md").read_text()
