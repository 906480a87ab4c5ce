"""Every sentence that a page shows as a message of the server is one that comes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.errors import EngineDeadError
from oarlock.server.cli import serve
from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.chat.start import _check_model
from oarlock.server.cli.main import main
from oarlock.server.config.settings import Settings
from oarlock.server.errors import describe
from oarlock.server.http.listeners import bind
from oarlock.server.http.server_state import Phase, ServerState
from oarlock.server.hub.local_model import find_local
from oarlock.server.hub.model_path import resolve
from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import WorkerError
from oarlock.workers.preflight import preflight
from tests.contract.conftest import DEMO

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ {0,3}```\w*\n.*?^ {0,3}```$", re.MULTILINE | re.DOTALL)
# What is typed, with which variables, to see the sentences of the pages.
STARTS: list[tuple[list[str], dict[str, str]]] = [
    (["--max-modle-len", "5"], {}),
    (["--drain-timeout", "soon"], {}),
    ([], {"OARLOCK_PROT": "8000"}),
    ([], {"OARLOCK_API_KEY": ""}),
    ([], {"OARLOCK_NODE_SECRET": "x"}),
]
REQUEST = re.compile(r"^\| (.+?) \| (\d{3}): `(.*)` \|$", re.MULTILINE)


def shown() -> set[tuple[str, str]]:
    """(page, sentence) of every code span that is a message: of several words and with a period, or after its label."""
    found = set()
    for page in PAGES:
        for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text())):
            message = re.search(r'"message": "([^"]+)"|cause="([^"]+)"', span)
            if message is not None:
                found.add((page.name, message[1] or message[2]))
            elif re.match(r"(error|fix): .", span) or (len(span.split()) >= 4 and span.endswith((".", "?"))):
                found.add((page.name, re.sub(r"^(error|fix): ", "", span)))
    return found


def without_numbers(sentence: str) -> str:
    """Without what differs from run to run: percents, and the ports and programs of processes."""
    sentence = re.sub(r"(Port|--port|process) \d+", r"\1 N", sentence)
    return re.sub(r"\d+%", "N%", re.sub(r"by process N \(.*?\)", "by process N", sentence))


def first_hour_requests() -> list[tuple[bytes, dict[str, str], int, str]]:
    """(body, headers, status, message) of each row of the page's table."""
    rows = []
    for request, status, message in REQUEST.findall((ROOT / "docs" / "first-hour.md").read_text()):
        body, headers = json.dumps({"prompt": "x"}).encode(), {"Content-Type": "application/json"}
        if request.startswith('`"'):
            body = json.dumps({"prompt": "x", **json.loads(f"{{{request.strip('`')}}}")}).encode()
        elif request.startswith("half a body"):
            body = request.split("`")[1].encode()
        elif request.startswith("no `Content-Type`"):
            headers = {}
        else:
            assert status == "503", request  # sent too early: `sentences` has it
            continue
        rows.append((body, headers, int(status), message))
    return rows


def test_the_first_hours_requests_are_answered_as_shown(make_stage):
    stage, rows = make_stage(), first_hour_requests()
    assert len(rows) == 5

    async def scenario():
        async with stage.client() as client:
            return [await client.post("/v1/completions", content=body, headers=headers) for body, headers, *_ in rows]

    for answer, (body, _, status, message) in zip(asyncio.run(scenario()), rows, strict=True):
        said = answer.json()["error"]["message"].replace("demo, alias/with/slash", "oarlock-demo")
        assert (answer.status_code, said) == (status, message), body


@pytest.fixture
def sentences(monkeypatch, capsys, tmp_path) -> set[str]:
    """Messages as they come, without numbers."""

    def not_started(*arguments, **options):
        raise AssertionError("a wrong value is found before any process starts")

    monkeypatch.setattr(serve, "engine_processes", not_started)
    found = [message for *_, message in first_hour_requests()]  # which the test above compares
    for arguments, environment in STARTS:
        with monkeypatch.context() as changed:
            for name, value in environment.items():
                changed.setenv(name, value)
            assert main(["serve", *arguments]) in (2, 3)
        lines = capsys.readouterr().err.splitlines()
        found += [line.split(": ", 1)[1] for line in lines if line.startswith(("error: ", "fix: "))]
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartupError) as refused:
        bind("127.0.0.1", taken.getsockname()[1])
    found += [refused.value.cause, refused.value.fix]
    for nodes in (1, 2):
        with pytest.raises(StartupError) as refused:
            preflight(WorkerConfig(str(DEMO), device="cpu", tensor_parallel_size=3, nnodes=nodes))
        found += [refused.value.cause, refused.value.fix]
    with pytest.raises(StartupError) as refused:
        asyncio.run(resolve(Settings(model="/nope"), lambda *progress: None))
    found += [refused.value.cause, refused.value.fix]
    (tmp_path / "model-Q4_K_M.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("model-Q4_K_N.gguf", "localhost:8000"):
        with pytest.raises((StartupError, UsageError)) as wrong:
            _check_model(name) if ":" in name else find_local(name)
        found += [wrong.value.cause.replace(str(tmp_path), "/data"), wrong.value.fix]
    loading = ServerState()
    loading.phase, loading.loading_step, loading.loading_fraction = Phase.LOADING, "loading", 0.89
    found.append(str(loading.why_not_ready()))
    found.append(describe(EngineDeadError("killed")).message)
    found.append(str(WorkerError(0, 52, "killed by signal 9")))
    return {without_numbers(sentence) for sentence in found}


def test_every_sentence_that_a_page_shows_is_one_that_comes(sentences):
    wanted = {(page, without_numbers(sentence)) for page, sentence in shown()}
    assert len(wanted) >= 15
    assert {(page, sentence) for page, sentence in wanted if not any(sentence in one for one in sentences)} == set()
