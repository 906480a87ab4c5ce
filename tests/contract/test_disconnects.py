"""A client that leaves is noticed, streaming or not, and the engine's work for it ends at once."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest


def _request(port, body, path="/v1/completions"):
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(head.encode() + b"\r\n" + data)
    return connection


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("pause_after", [0, 2])
def test_a_streaming_client_leaves(make_server, wait_for, pause_after, n):
    server = make_server("one two three four", pause_after=pause_after)
    connection = _request(server.port, {"prompt": "x", "stream": True, "n": n, "max_tokens": 50})
    wait_for(lambda: len(server.stage.engine.requests) == n)
    if pause_after:
        received = b""
        while b"data: " not in received:  # the head and the first event may come apart
            received += connection.recv(65536)
    connection.close()
    wait_for(lambda: sorted(server.stage.engine.aborted) == list(range(1, n + 1)))
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    assert server.stage.state.async_llm.open == set()
    assert server.stage.counters.finished["stop"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_waiting_client_leaves(make_server, wait_for, path):
    server = make_server("one two three four", pause_after=2)
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    connection = _request(server.port, body, path)
    wait_for(lambda: len(server.stage.engine.requests) == 1)
    connection.close()
    wait_for(lambda: server.stage.engine.aborted == [1])
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    assert server.stage.state.async_llm.open == set()


def test_a_client_that_leaves_in_the_middle_of_its_body(make_server, wait_for):
    server = make_server()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    wait_for(lambda: server.stage.state.num_in_flight == 1)
    connection.close()
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    assert server.stage.engine.requests == []


def test_many_clients_leave_and_nothing_stays(make_server, wait_for):
    server = make_server("one two three four", pause_after=1)
    connections = [_request(server.port, {"prompt": "x", "stream": bool(i % 2)}) for i in range(40)]
    wait_for(lambda: len(server.stage.engine.requests) == 40)
    for connection in connections[:30]:
        connection.close()
    wait_for(lambda: len(server.stage.engine.aborted) == 30)
    server.stage.engine.resume._loop.call_soon_threadsafe(server.stage.engine.resume.set)
    for connection in connections[30:]:
        data = b""
        while not data.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"}")):
            data += connection.recv(65536)
        assert data.startswith(b"HTTP/1.1 200")
        connection.close()
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    assert len(server.stage.engine.finished) == 10
    assert server.stage.counters.finished == {"stop": 10, "length": 0, "timeout": 0, "abort": 30, "error": 0}


def test_an_error_in_the_middle_of_a_stream_is_one_event_before_the_end(make_server):
    for options, code, kind in (
        ({"fail_after": 2}, "engine_error", "server_error"),
        ({"fail_after": 2, "blamed": "bad_words"}, "no_token_left", "invalid_request_error"),
        ({"die_after": 2}, "engine_dead", "server_error"),
    ):
        server = make_server("one two three", **options)
        connection = _request(server.port, {"prompt": "x", "stream": True})
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(65536)
        events = [line for line in data.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2][6:])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["type"]) == (code, kind)
        assert '"text":"one"' in events[0]
        connection.close()


def test_an_error_without_a_stream_is_a_plain_answer(make_server):
    for options, status in (
        ({"fail_after": 2}, 500),
        ({"die_after": 2}, 503),
        ({"fail_after": 2, "blamed": "bad_words"}, 400),
    ):
        server = make_server("one two three", **options)
        connection = _request(server.port, {"prompt": "x"})
        assert connection.recv(65536).startswith(f"HTTP/1.1 {status}".encode())
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_which_memory_ran_out_may_be_sent_again(make_server, stream):
    server = make_server("one", fail_after=0, missing="out_of_memory")
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": stream})
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(("blamed", "status"), [(None, 500), ("logit_bias", 400)])
def test_an_error_before_any_token_is_a_plain_answer_to_a_stream_too(make_server, blamed, status):
    server = make_server("one", fail_after=0, blamed=blamed)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == blamed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/completions/render", "/tokenize"])
def test_a_long_text_is_left_alone_when_its_sender_leaves(make_server, wait_for, tokenizer, monkeypatch, path):
    """Two hundred thousand characters are four pieces of work; only the one that has begun is finished."""
    server = make_server()
    begun, release, encode = [], threading.Event(), tokenizer.encode

    def slow(text, **options):
        begun.append(len(text))
        release.wait(40)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr(server.stage.state.async_llm.input_processor, "max_len", 1_000_000)
    words = "some words " * 20_000
    body = {"messages": [{"role": "user", "content": words}]} if "chat" in path else {"prompt": words}
    connection = _request(server.port, body, path)
    wait_for(lambda: len(begun) == 1)
    connection.close()
    wait_for(lambda: server.stage.state.num_in_flight == 0)
    release.set()
    behind = tokenizer._long_pool.submit(begun.copy)
    assert behind.result(40) == begun
    assert len(begun) == 1
    assert begun[0] < 100_000
    assert server.stage.engine.requests == []
