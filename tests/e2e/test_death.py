"""Whichever process is killed, open requests get an error at once, the server ends with its documented status, and no
process or shared memory stays.
"""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.running import DEMO, RunningServer, eventually, shared_memory

WORKER_DIED, ENGINE_HUNG = 5, 6  # the documented statuses
STEP_TIMEOUT_S = 3
SHORT = 3000  # tokens: over soon after the test has acted
PATIENT = ("--drain-timeout", 120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return long_context_demo(tmp_path_factory.mktemp("long-context"))


class OpenStream(threading.Thread):
    """A client in the middle of a long stream."""

    def __init__(self, server, tokens=LONG):
        super().__init__(daemon=True)
        self.url = server.url
        self.body = {"prompt": "import os\n", "stream": True, "max_tokens": tokens, "ignore_eos": True}
        self.flowing = threading.Event()
        self.last: dict = {}
        self.done = False
        self.ended_at = 0.0
        self.failure: Exception | None = None
        self.start()

    def run(self):
        url = f"{self.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=self.body, timeout=120, trust_env=False) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.last = json.loads(line[6:])
                        self.flowing.set()
        except httpx.HTTPError as error:
            self.failure = error
        self.ended_at = time.monotonic()


def open_streams(server, count=4, tokens=LONG):
    streams = [OpenStream(server, tokens) for _ in range(count)]
    for stream in streams:
        assert stream.flowing.wait(20), server.log
    return streams


def family(server):
    """The engine, and its ranks in order."""
    (engine,) = psutil.Process(server.process.pid).children()
    return engine, sorted(engine.children(), key=lambda process: process.create_time())


def nothing_left(server):
    eventually(lambda: not server.left_behind(), 5, f"no process is left of\n{server.log}")
    eventually(lambda: shared_memory() <= server.shared_before, 5, "no shared-memory segment is left")


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "engine"])
def test_a_killed_child_fails_every_open_request_and_ends_the_server(model, victim):
    with RunningServer(model, "-tp", 2) as server:
        engine, ranks = family(server)
        assert len(ranks) == 2
        streams = open_streams(server)
        target = engine if victim == "engine" else ranks[int(victim[-1])]
        target.kill()
        killed_at = time.monotonic()
        for stream in streams:
            stream.join(2)
            assert not stream.is_alive(), f"no answer within 2 s of the death of {victim}\n{server.log}"
            assert stream.failure is None
            assert stream.last["error"]["type"] == "server_error", stream.last
            assert stream.done
            assert stream.ended_at - killed_at < 2
        assert server.process.wait(10) == WORKER_DIED, server.log
        assert "Traceback" not in server.log
        if victim != "engine":
            assert victim in server.log
        nothing_left(server)


def test_a_killed_parent_takes_its_children_along(model):
    with RunningServer(model, "-tp", 2) as server:
        open_streams(server, 2)
        assert len(server.processes()) == 4
        server.process.kill()
        server.process.wait(5)
        nothing_left(server)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_leaves_when_asked(ranks, number):
    with RunningServer(DEMO, "-tp", ranks) as server:
        assert server.stop(number, within_s=10) == 0, server.log
        assert "Traceback" not in server.log
        nothing_left(server)


def test_ctrl_c_reaches_the_whole_group_and_is_still_an_orderly_end(model):
    with RunningServer(model, "-tp", 2, *PATIENT) as server:
        (stream,) = open_streams(server, 1, SHORT)
        os.killpg(server.process.pid, signal.SIGINT)  # what a terminal does: parent and children all get it
        stream.join(130)
        assert stream.done and stream.failure is None
        assert stream.last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0, server.log
        assert "Traceback" not in server.log
        nothing_left(server)


def test_open_requests_finish_while_new_ones_are_refused(model):
    with RunningServer(model, *PATIENT) as server:
        (stream,) = open_streams(server, 1, SHORT)
        server.send(signal.SIGTERM)
        eventually(lambda: server.client.get("/health").status_code == 503, 10, "the server drains")
        assert server.client.get("/health").json()["state"] == "draining"
        refused = server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert not stream.done
        stream.join(130)
        assert stream.done and stream.last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(10) == 0, server.log


def test_a_second_signal_does_not_wait(model):
    with RunningServer(model, "--drain-timeout", 60) as server:
        (stream,) = open_streams(server, 1)
        server.send(signal.SIGTERM)
        time.sleep(0.3)
        server.send(signal.SIGTERM)
        assert server.process.wait(5) != 0
        stream.join(5)
        assert not stream.is_alive()
        nothing_left(server)


def test_requests_that_outlast_the_drain_are_ended_with_an_error(model):
    with RunningServer(model, "--drain-timeout", "0.2") as server:
        (stream,) = open_streams(server, 1)
        assert server.stop(within_s=10) != 0, "requests were lost, so the status must not be 0"
        stream.join(5)
        assert stream.last.get("error"), stream.last


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_engine_fails_every_open_request_and_ends_the_server(model, ranks):
    with RunningServer(model, "-tp", ranks, "--step-timeout", STEP_TIMEOUT_S) as server:
        engine, children = family(server)
        (stream,) = open_streams(server, 1)
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "max_tokens": LONG, "ignore_eos": True}
            whole = pool.submit(server.client.post, "/v1/completions", json=body)
            eventually(lambda: server.metrics()["vllm:num_requests_running"] == 2, 10, "both run")
            for process in (*children[:1], engine):  # a rank that is stopped, too, reads no end of file
                process.suspend()
            answer = whole.result(30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        stream.join(5)
        assert stream.done and stream.last["error"]["code"] == "engine_dead", stream.last
        assert server.process.wait(10) == ENGINE_HUNG, server.log
        (silent_s,) = re.findall(r"event=engine_hung silent_s=([0-9.]+)", server.log)
        assert float(silent_s) < STEP_TIMEOUT_S + 4, "it takes too long to find out"
        nothing_left(server)
