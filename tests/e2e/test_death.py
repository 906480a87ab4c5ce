"""Whichever process is killed, open requests get an error at once, the server ends with its documented status, and no
process or shared memory stays.
"""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import RunningServer, eventually, shared_memory

WORKER_DIED, ENGINE_HUNG = 5, 6  # the documented statuses
STEP_TIMEOUT_S = 3
SHORT = 800  # tokens: over soon after the test has acted
PATIENT = ("--drain-timeout", 120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return long_context_demo(tmp_path_factory.mktemp("long-context"))


def open_streams(server, count=4, tokens=LONG):
    streams = [OpenStream(server, tokens) for _ in range(count)]
    for stream in streams:
        assert stream.flowing.wait(60), server.log
    return streams


def family(server):
    """The engine, and its ranks in order."""
    children = psutil.Process(server.process.pid).children()
    (engine,) = (child for child in children if "oarlock.engine.core" in child.cmdline())
    return engine, sorted(engine.children(), key=lambda process: process.create_time())


def nothing_left(server):
    eventually(lambda: not server.left_behind(), 60, f"no process is left of\n{server.log}")
    eventually(lambda: shared_memory() <= server.shared_before, 60, "no shared-memory segment is left")


@pytest.mark.parametrize(
    "victim", [pytest.param("rank 0", marks=pytest.mark.soak), "rank 1", pytest.param("engine", marks=pytest.mark.soak)]
)
def test_a_killed_child_fails_every_open_request_and_ends_the_server(model, victim):
    with RunningServer(model, "-tp", 2) as server:
        engine, ranks = family(server)
        assert len(ranks) == 2
        streams = open_streams(server)
        target = engine if victim == "engine" else ranks[int(victim[-1])]
        target.kill()
        for stream in streams:
            stream.join(60)
            assert not stream.is_alive(), f"no answer after the death of {victim}\n{server.log}"
            assert stream.failure is None
            assert stream.last["error"]["type"] == "server_error", stream.last
            assert stream.done
        assert server.process.wait(60) == WORKER_DIED, server.log
        assert "Traceback" not in server.log
        if victim != "engine":
            assert victim in server.log
        nothing_left(server)


def test_a_killed_parent_takes_its_children_along(model):
    with RunningServer(model) as server:
        open_streams(server, 2)
        assert len(server.processes()) == 5  # also those of chat templates: one that renders, and its parent
        server.process.kill()
        server.process.wait(60)
        nothing_left(server)


# What a terminal does, and a service manager or torchrun: parent and children all get it.
@pytest.mark.soak  # within one process: tests/contract/test_lifecycle.py
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_open_requests_finish_while_new_ones_are_refused_after_a_signal_to_the_whole_group(model, number):
    with RunningServer(model, *PATIENT) as server:
        (stream,) = open_streams(server, 1, SHORT)
        os.killpg(server.process.pid, number)
        eventually(lambda: server.client.get("/health").status_code == 503, 60, "the server drains")
        assert server.client.get("/health").json()["state"] == "draining"
        refused = server.client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        assert not stream.done
        stream.join(130)
        assert stream.done and stream.failure is None
        assert stream.last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0, server.log
        assert "Traceback" not in server.log
        nothing_left(server)


@pytest.mark.soak  # this and the next within one process: tests/contract/test_lifecycle.py
def test_a_second_signal_does_not_wait(model):
    with RunningServer(model, "--drain-timeout", 600) as server:
        (stream,) = open_streams(server, 1)
        server.send(signal.SIGTERM)
        eventually(lambda: server.client.get("/health").status_code == 503, 60, "the server drains")
        server.send(signal.SIGTERM)
        assert server.process.wait(60) != 0
        stream.join(60)
        assert not stream.is_alive()
        nothing_left(server)


@pytest.mark.soak
def test_requests_that_outlast_the_drain_are_ended_with_an_error(model):
    with RunningServer(model, "--drain-timeout", "0.2") as server:
        (stream,) = open_streams(server, 1)
        assert server.stop(within_s=60) != 0, "requests were lost, so the status must not be 0"
        stream.join(60)
        assert stream.last.get("error"), stream.last


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_stopped_engine_fails_every_open_request_and_ends_the_server(model, ranks):
    with RunningServer(model, "-tp", ranks, "--step-timeout", STEP_TIMEOUT_S) as server:
        engine, children = family(server)
        (stream,) = open_streams(server, 1)
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "x", "max_tokens": LONG, "ignore_eos": True}
            whole = pool.submit(server.client.post, "/v1/completions", json=body)
            eventually(lambda: server.metrics()["vllm:num_requests_running"] == 2, 60, "both run")
            for process in (*children[:1], engine):  # a rank that is stopped, too, reads no end of file
                process.suspend()
            answer = whole.result(60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        stream.join(60)
        assert stream.done and stream.last["error"]["code"] == "engine_dead", stream.last
        assert server.process.wait(60) == ENGINE_HUNG, server.log
        assert "event=engine_hung" in server.log
        nothing_left(server)
