"""The phases of one server process: loading, ready, draining, dead; what clients receive, and the exit code."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import make_settings
from oarlock.server.http.listeners import bind, url_of
from oarlock.server.http.server_state import Phase
from oarlock.server.launch.supervisor import Supervisor

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="signals")
BODY = {"prompt": "x", "stream": True}


@pytest.fixture
def make_supervisor(make_stage, monkeypatch):
    """A supervisor on a free port around a fake engine that starts when `gate` opens.

    Its watchdog, which would end this process, fails the test instead.
    """
    left = []
    monkeypatch.setattr("oarlock.server.launch.supervisor._exit_now", left.append)

    def make(*args, gate=None, error=None, drain_timeout=30.0, **options):
        engine = make_stage(*args, **options).engine

        async def start(config, on_progress):
            on_progress("loading weights", 0.43)
            if gate is not None:
                await gate.wait()
            if error is not None:
                raise error
            return engine

        listener = bind("127.0.0.1", 0)
        settings = make_settings({"drain_timeout": drain_timeout, "log_level": "error", "admin_api_key": "boss"})
        return Supervisor(settings, listener, start), engine, url_of(listener)

    yield make
    assert left == []


async def _until(condition):
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.005)


def _send(run, number):
    """A signal to the supervisor, which must be there to take it: else it would end this process."""
    assert not run.done()
    signal.raise_signal(number)


async def _ready(supervisor):
    await _until(lambda: supervisor.state.phase is Phase.READY)


async def _read(client, url, body=BODY, lines=None):
    """The events of one stream, to its end; `lines` has them as they arrive."""
    lines = [] if lines is None else lines
    async with client.stream("POST", url + "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line)
    return lines


def test_probes_answer_while_the_model_loads(make_supervisor, capsys):
    async def scenario():
        gate = asyncio.Event()
        supervisor, engine, url = make_supervisor(gate=gate)
        run = asyncio.create_task(supervisor.run())
        async with httpx.AsyncClient() as client:
            await _until(lambda: supervisor.state.loading_step == "loading weights")
            health = await client.get(url + "/health")
            assert (health.status_code, health.json()["progress"]) == (503, 0.43)
            assert "Retry-After" in health.headers
            assert (await client.get(url + "/health/live")).status_code == 200
            assert (await client.get(url + "/version")).status_code == 200
            assert (await client.get(url + "/metrics")).status_code == 200
            refused = await client.post(url + "/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_loading")
            assert "43%" in refused.json()["error"]["message"]
            assert "Retry-After" in refused.headers
            gate.set()
            await _ready(supervisor)
            assert (await client.get(url + "/health")).json() == {"status": "ok", "state": "ready"}
            engine.last_progress_age_s = 31.0
            stalled = await client.get(url + "/health/ready")
            assert stalled.status_code == 503
            assert "31 seconds" in stalled.json()["reason"]
        _send(run, signal.SIGINT)
        return await run, engine, url

    code, engine, url = asyncio.run(scenario())
    assert code == 0
    assert engine.closed
    printed = capsys.readouterr().out
    assert printed.startswith("Oarlock is ready.\n")
    assert url in printed
    assert "64 blocks of 16 = 1024 tokens = 4 users at 256 tokens" in printed
    assert "curl -s " in printed


def test_sigterm_finishes_streams_and_refuses_new_requests(make_supervisor):
    async def scenario():
        supervisor, engine, url = make_supervisor("one two three", pause_after=2)
        run = asyncio.create_task(supervisor.run())
        await _ready(supervisor)
        async with httpx.AsyncClient() as client:
            streams = [asyncio.create_task(_read(client, url)) for _ in range(5)]
            await _until(lambda: len(engine.requests) == 5)
            _send(run, signal.SIGTERM)
            await _until(lambda: supervisor.state.phase is Phase.DRAINING)
            refused = await client.post(url + "/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
            assert refused.headers["Retry-After"]
            assert (await client.get(url + "/health")).status_code == 503
            engine.resume.set()
            for stream in streams:
                lines = await stream
                assert lines[-1] == "data: [DONE]"
                assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "stop"
        return await run

    assert asyncio.run(scenario()) == 0


def test_the_operator_drains_as_sigterm_does(make_supervisor):
    async def scenario():
        supervisor, engine, url = make_supervisor("one two three", pause_after=2)
        run = asyncio.create_task(supervisor.run())
        await _ready(supervisor)
        boss = {"Authorization": "Bearer boss"}
        async with httpx.AsyncClient() as client:
            begun = []
            stream = asyncio.create_task(_read(client, url, lines=begun))
            await _until(lambda: begun)
            for _ in range(2):
                answer = await client.post(url + "/admin/drain", headers=boss)
                assert (answer.status_code, answer.json()) == (202, {"status": "draining", "open": 1})
            refused = await client.post(url + "/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
            assert refused.headers["Retry-After"]
            assert (await client.get(url + "/health/ready")).status_code == 503
            _send(run, signal.SIGTERM)  # the first: as patient as the drain that runs
            await asyncio.sleep(0)
            assert not run.done()
            engine.resume.set()
            lines = await stream
            assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "stop"
        return await run, engine.closed

    assert asyncio.run(scenario()) == (0, True)


def test_a_drain_that_times_out_fails_open_requests_and_exits_with_its_own_code(make_supervisor):
    async def scenario():
        supervisor, engine, url = make_supervisor("one two three", pause_after=2, drain_timeout=0.05)
        run = asyncio.create_task(supervisor.run())
        await _ready(supervisor)
        async with httpx.AsyncClient() as client:
            begun = []
            stream = asyncio.create_task(_read(client, url, lines=begun))
            await _until(lambda: begun)
            _send(run, signal.SIGTERM)
            lines = await stream
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["error"]["code"] == "server_draining"
        assert engine.aborted == [1]
        return await run

    assert asyncio.run(scenario()) == 7


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_stops_at_once(make_supervisor, number, expected):
    async def scenario():
        supervisor, _, url = make_supervisor("one two three", pause_after=2)
        run = asyncio.create_task(supervisor.run())
        await _ready(supervisor)
        async with httpx.AsyncClient() as client:
            begun = []
            stream = asyncio.create_task(_read(client, url, lines=begun))
            await _until(lambda: begun)
            _send(run, number)
            await _until(lambda: supervisor.state.phase is Phase.DRAINING)
            _send(run, number)
            assert (await stream)[-1] == "data: [DONE]"
        return await run

    assert asyncio.run(scenario()) == expected


@pytest.mark.parametrize("exit_code", [5, 6])
def test_a_dead_engine_fails_every_open_request_and_decides_the_exit_code(make_supervisor, exit_code):
    async def scenario():
        supervisor, engine, url = make_supervisor("one two three", pause_after=2)
        run = asyncio.create_task(supervisor.run())
        await _ready(supervisor)
        async with httpx.AsyncClient() as client:
            begun = [[], [], []]
            streams = [asyncio.create_task(_read(client, url, lines=lines)) for lines in begun]
            waiting = asyncio.create_task(client.post(url + "/v1/completions", json={"prompt": "x"}))
            await _until(lambda: len(engine.requests) == 4 and all(begun))
            engine.die(exit_code)
            for stream in streams:
                lines = await stream
                assert lines[-1] == "data: [DONE]"
                assert json.loads(lines[-2][6:])["error"]["code"] == "engine_dead"
            answer = await waiting
            assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
        return await run

    assert asyncio.run(scenario()) == exit_code


def test_a_failed_start_stops_the_server_and_keeps_its_cause(make_supervisor):
    async def scenario():
        supervisor, _, _ = make_supervisor(error=StartupError("14 heads do not divide by 4.", "Use -tp 2.", 3))
        await supervisor.run()

    with pytest.raises(StartupError, match="14 heads"):
        asyncio.run(scenario())


def test_a_signal_while_loading_stops_the_load(make_supervisor):
    async def scenario():
        supervisor, _, _ = make_supervisor(gate=asyncio.Event())
        run = asyncio.create_task(supervisor.run())
        await _until(lambda: supervisor.state.loading_step == "loading weights")
        _send(run, signal.SIGTERM)
        return await run

    assert asyncio.run(scenario()) == 0
