"""Processes of ours import what we import, and nothing from the folder in which they were started."""

import subprocess
from pathlib import Path

import pytest

from oarlock.base.python_child import HUB_SECRETS, SECRETS, import_path, start_python
from oarlock.server.config.settings import OPTIONS

ROOT = Path(__file__).resolve().parents[3]


def test_a_folder_of_the_caller_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "of_the_user.py").write_text("")
    for name in ("json", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('foreign code')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{own}:")  # whose empty entries mean the current directory
    with start_python(["-c", "import json, logging, of_the_user, workers"], stdin=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0


def test_the_users_own_path_comes_after_ours() -> None:
    assert import_path("") == str(ROOT)
    assert import_path("/one::/two:") == f"{ROOT}:/one:/two"


def test_keys_reach_only_a_child_that_needs_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "the-key")
    seen = tmp_path / "seen"
    program = f"import os; open({str(seen)!r}, 'w').write(' '.join(k for k, v in os.environ.items() if 'the-key' in v))"
    for needed in ((), HUB_SECRETS):
        with start_python(["-c", program], secrets=needed) as process:
            assert process.wait(60) == 0
        assert set(seen.read_text().split()) == set(needed)


def test_every_secret_option_is_kept_from_children() -> None:
    options = {described.env for described in OPTIONS.values() if described.secret}
    assert options <= SECRETS, "a secret option's variable is not in SECRETS"
    assert options | HUB_SECRETS == SECRETS
