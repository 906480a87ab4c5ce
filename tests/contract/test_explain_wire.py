"""`GET /v1/requests/{id}` and `oarlock explain`: who may ask, which requests are found, and that no text is shown."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess

import httpx
import pytest

from oarlock.base.python_child import EXIT_UNREAD
from oarlock.server.cli import main as cli
from oarlock.server.http.request_record import MAX_RECORDS, RecentRequests, RequestRecord
from tests.e2e.running import command, environment

ADMIN = {"Authorization": "Bearer boss"}


def _sent(stage, *requests, headers=ADMIN) -> list[httpx.Response]:
    """Completions, each with its id and body, then the explanation of each."""

    async def scenario() -> list[httpx.Response]:
        answers = []
        async with stage.client() as client:
            for request_id, body in requests:
                await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
            for request_id, _ in requests:
                answers.append(await client.get(f"/v1/requests/{request_id}", headers=headers))
        return answers

    return asyncio.run(scenario())


def _asked(stage, path, headers=None) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with stage.client(headers=headers or {}) as client:
            return await client.get(path)

    return asyncio.run(scenario())


def test_ended_and_refused_requests_are_found_without_their_text(make_stage):
    stage = make_stage("a secret answer", admin_api_key="boss")
    good, wrong = _sent(
        stage, ("one", {"prompt": "my secret prompt"}), ("two", {"prompt": "my secret prompt", "top_p": 7})
    )
    one, two = good.json(), wrong.json()
    assert (one["id"], one["state"], one["status"], one["finish_reasons"]) == ("cmpl-one", "ended", 200, ["stop"])
    assert one["prompt_tokens"] > 1 and one["completion_tokens"] > 1
    assert [event["event"] for event in one["timeline"]] == ["received", "validated", "sent to the engine", "answered"]
    assert (two["status"], two["error"]["param"], two["choices"]) == (400, "top_p", 0)
    assert "`top_p`" in two["diagnosis"]
    assert "secret" not in good.text + wrong.text


def test_it_opens_to_the_admin_key_alone(make_stage):
    stage = make_stage(admin_api_key="boss", api_key=("sk",))
    request = ("one", {"prompt": "x"})
    assert _sent(stage, request, headers={})[0].status_code == 401
    assert _sent(stage, request, headers={"Authorization": "Bearer sk"})[0].status_code == 403


REBOUND = {"Host": "rebound.example.org"}
NETWORK = {"host": "0.0.0.0", "open_metrics": True}


@pytest.mark.parametrize(("path", "found"), [("/v1/requests/nobody", "request_not_found"), ("/v1/state", None)])
@pytest.mark.parametrize(
    ("settings", "headers", "refusal"),
    [
        ({}, {}, None),
        ({"uds": "/tmp/oarlock.sock"}, {}, None),
        (NETWORK, {}, None),
        ({}, {"Authorization": "Bearer sk-whatever-clients-send"}, None),
        ({}, REBOUND, "host_not_allowed"),
        (NETWORK, REBOUND, "host_not_allowed"),
        ({"allowed_hosts": ("rebound.example.org",)}, REBOUND, None),
    ],
)
def test_without_keys_it_is_open_where_the_live_state_is(make_stage, path, found, settings, headers, refusal):
    answer = _asked(make_stage(**settings), path, headers)
    assert answer.json().get("error", {}).get("code") == (refusal or found)


@pytest.mark.parametrize(
    "settings",
    [{"host": "0.0.0.0"}, {"api_key": ("sk",)}, {"admin_api_key": "boss"}, {"api_key": ("sk",), "uds": "/x"}],
)
def test_keys_and_the_network_close_it(make_stage, settings):
    """API keys keep clients apart, also on one machine, and one who gave an admin key wants it asked for."""
    code = "invalid_api_key" if "admin_api_key" in settings else "admin_disabled"
    assert _asked(make_stage(**settings), "/v1/requests/nobody").json()["error"]["code"] == code
    sent = {"Authorization": "Bearer sk"}
    assert _asked(make_stage(**settings), "/v1/requests/nobody", headers=sent).status_code == 403


@pytest.mark.parametrize("path", ["/admin/abort", "/admin/drain", "/admin/reset_prefix_cache"])
def test_an_open_server_is_not_controlled_without_a_key(make_stage, path):
    async def scenario():
        async with make_stage().client() as client:
            return await client.post(path, json={"all": True})

    assert asyncio.run(scenario()).json()["error"]["code"] == "admin_disabled"


def test_an_answers_own_id_finds_it_and_an_unknown_one_is_a_404(make_stage):
    stage = make_stage(admin_api_key="boss")

    async def scenario():
        async with stage.client(headers=ADMIN) as client:
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            found = await client.get(f"/v1/requests/{answer['id']}")
            return answer["id"], found.json(), await client.get("/v1/requests/nobody")

    response_id, found, missing = asyncio.run(scenario())
    assert found["id"] == response_id and found["route"] == "/v1/chat/completions"
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


def test_a_stream_that_fails_and_one_that_runs_are_explained(make_stage):
    stage = make_stage(admin_api_key="boss", fail_after=2)
    (failed,) = _sent(stage, ("one", {"prompt": "x", "stream": True}))
    assert (failed.json()["status"], failed.json()["error"]["status"]) == (200, 500)

    stage = make_stage(admin_api_key="boss", pause_after=1)

    async def scenario() -> dict:
        async with stage.client() as client, asyncio.timeout(60):
            body, headers = {"prompt": "x", "stream": True}, {"x-request-id": "two"}
            stream = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
            while not stage.engine.requests:
                await asyncio.sleep(0.01)
            found = (await client.get("/v1/requests/two", headers=ADMIN)).json()
            stage.engine.resume.set()
            await stream
            return found

    found = asyncio.run(scenario())
    assert (found["state"], found["status"]) == ("processing", None)
    assert next(iter(stage.state.requests)).generation is None, "a request that has ended keeps no prompt alive"


def test_time_in_which_the_connection_was_full_is_counted(make_stage):
    stage = make_stage(admin_api_key="boss")
    sent = asyncio.Event()

    async def send(message):
        if message["type"] == "http.response.body" and not sent.is_set():
            sent.set()
            await asyncio.sleep(0.3)

    async def scenario() -> RequestRecord:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(3600)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"x-request-id", b"slow")]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await stage.app(scope, receive, send)
        found = stage.state.requests.find("slow")
        assert found is not None
        return found

    record = asyncio.run(scenario())
    assert record.num_slow >= 1 and record.sending_s >= 0.3
    assert record.num_sent > record.num_slow


def test_the_last_thousand_are_kept_and_of_equal_ids_the_last():
    recent = RecentRequests()
    for number in range(MAX_RECORDS + 5):
        recent.open(RequestRecord(str(number), "/v1/completions"))
    assert recent.find("4") is None and recent.find("cmpl-5") is not None
    recent.open(RequestRecord("5", "/v1/chat/completions"))
    assert len(list(recent)) == MAX_RECORDS
    found = recent.find("5")
    assert found is not None and found.route == "/v1/chat/completions"


@pytest.fixture
def running(make_server, monkeypatch):
    monkeypatch.setenv("OARLOCK_ADMIN_API_KEY", "boss")
    return make_server(admin_api_key="boss")


def test_the_command_shows_the_timeline_and_the_diagnosis(running, capsys):
    httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "one"}, timeout=60)
    assert cli.main(["explain", "one", f"{running.url}/v1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("cmpl-one  /v1/completions, ended with status 200\n")
    assert cli.main(["explain", "cmpl-one", running.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["id"] == "cmpl-one"
    assert "sent to the engine" in shown and found["diagnosis"] in shown


UNREAD = [
    "--help",
    "config show",
    "models",
    "snippets URL",
    "explain one URL --json",
    "explain nobody URL 2>&1",
    "top URL",
    "nonsense 2>&1",
]


def _without_reader(words: str, url: str) -> subprocess.Popen[bytes]:
    """The command with its output in a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    words, joined, _ = words.partition(" 2>&1")
    started = subprocess.Popen(
        command(*shlex.split(words.replace("URL", url))),
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer if joined else subprocess.PIPE,
        env={**environment(OARLOCK_ADMIN_API_KEY="boss"), "PYTHONUNBUFFERED": ""},
    )
    os.close(writer)
    return started


@pytest.mark.slow
def test_a_command_whose_output_nobody_reads_ends_silently(running):
    """Commands run as before `| head -1`, side by side, since each takes a while to start."""
    httpx.post(f"{running.url}/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "one"}, timeout=60)
    for at in range(0, len(UNREAD), 4):
        some = UNREAD[at : at + 4]
        started = {words: _without_reader(words, running.url) for words in some}
        for words, process in started.items():
            _, said = process.communicate(timeout=120)
            assert not said, (words, said)
            assert process.returncode == (1 if words == "top URL" else EXIT_UNREAD), words  # rich ends with 1


@pytest.mark.parametrize(
    ("words", "key", "cause"),
    [
        (["nobody"], "boss", "None of the last 1000"),
        (["one"], "other", "not the admin key"),
        (["one"], "", "The admin key is required"),
        (["one", "http://127.0.0.1:1"], "boss", "No server responds at http://127.0.0.1:1 (Connection refused)"),
        (["one", "ftp://x"], "boss", "ftp://x is not the address of a server"),
    ],
)
def test_faults_are_one_line_with_a_fix(running, monkeypatch, capsys, words, key, cause):
    monkeypatch.setenv("OARLOCK_ADMIN_API_KEY", key)
    url = [] if len(words) == 2 else [running.url]
    assert cli.main(["explain", *words, *url]) in (2, 3)
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and cause in error and fix.startswith("fix: ")
