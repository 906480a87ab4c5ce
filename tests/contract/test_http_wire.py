"""HTTP/1.1 over real sockets: unusual clients, refusals that must arrive, and the limit of connections."""

from __future__ import annotations

import asyncio
import http.client
import json
import resource
import socket

import pytest
import uvloop

from oarlock.server.http.uvicorn_server import connection_limit, raise_descriptor_limit

BODY = b'{"prompt": "x", "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def _connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def _read(connection):
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def _answer(connection):
    """One answer: its status and its body."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


@LOOPS
def test_a_java_client_that_offers_http2_is_served(make_server, loop):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQ\r\n"
    with _connect(make_server(loop=loop)) as connection:
        connection.sendall(POST + offer + LENGTH + BODY + POST + b"Connection: close\r\n" + LENGTH + BODY)
        answer = _read(connection)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b'"text_completion"') == 2


@LOOPS
def test_a_client_that_writes_first_and_reads_later_gets_its_413(make_server, loop):
    server = make_server(loop=loop, max_body_size=2048)
    for declared in (True, False):
        for _ in range(5):
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            headers = {"Content-Type": "application/json"}
            body = bytes(8 * 2**20)
            client.request("POST", "/v1/completions", body if declared else iter([body] * 2), headers)
            answer = client.getresponse()
            assert (answer.status, answer.headers["Connection"]) == (413, "close")
            assert json.loads(answer.read())["error"]["code"] == "body_too_large"
            client.close()


@LOOPS
def test_a_head_that_is_too_large_is_refused_while_it_is_sent(make_server, loop):
    with _connect(make_server(loop=loop)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 8 * 2**20)
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


@pytest.mark.slow
def test_a_refused_request_whose_rest_never_comes_does_not_keep_its_connection(make_server, monkeypatch):
    monkeypatch.setattr("oarlock.server.http.connection.LINGER_TIMEOUT_S", 0.05)
    server = make_server()
    late = b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with _connect(server) as connection:
        connection.sendall(late)
        assert _answer(connection)[0] == 404
        connection.sendall(b"{")
        assert connection.recv(65536) == b""


def test_a_body_with_broken_framing_is_refused(make_server):
    with _connect(make_server()) as connection:
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n")
        assert _read(connection).startswith(b"HTTP/1.1 400 ")


def test_trailers_are_accepted(make_server):
    with _connect(make_server()) as connection:
        head = POST + b"TE: trailers\r\nConnection: TE, close\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(BODY), BODY))
        assert _read(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_head_is_answered_like_get_without_the_body(make_server):
    client = http.client.HTTPConnection("127.0.0.1", make_server().port, timeout=60)
    answers = {}
    for method in ("GET", "HEAD"):
        for path in ("/health", "/health/live", "/version", "/v1/models", "/v1/models/demo", "/metrics", "/docs"):
            client.request(method, path)
            answer = client.getresponse()
            answers[method, path] = answer.status, answer.headers["Content-Type"]
            assert bool(answer.read()) == (method == "GET"), path
    assert all(answers["GET", path] == answers["HEAD", path] == (200, kind) for (_, path), (_, kind) in answers.items())
    client.request("HEAD", "/v1/completions")
    assert client.getresponse().status == 405
    client.close()


def test_beyond_the_limit_of_connections_only_probes_are_answered(make_server, wait_for):
    server = make_server(max_connections=3, pause_after=0)
    held = [_connect(server) for _ in range(3)]
    for connection in held:
        connection.sendall(POST + LENGTH + BODY)
    wait_for(lambda: len(server.stage.engine.requests) == 3)
    with _connect(server) as late:
        late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _answer(late)[0] == 200
        late.sendall(POST + LENGTH + BODY)
        answer = _read(late)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in answer
    assert b'"too_many_connections"' in answer
    assert len(server.stage.engine.requests) == 3
    for connection in held:
        connection.close()
    wait_for(lambda: server.stage.state.num_in_flight == 0)


def test_beyond_the_limit_idle_connections_give_way(make_server):
    server = make_server(max_connections=2)
    idle = [_connect(server) for _ in range(2)]
    for connection in idle:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _answer(connection)[0] == 200
    with _connect(server) as newcomer:
        newcomer.sendall(POST + LENGTH + BODY)
        assert _answer(newcomer)[0] == 200
    assert idle[0].recv(65536) == b""
    for connection in idle:
        connection.close()


def test_the_limit_of_connections_leaves_descriptors_for_the_rest():
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, expected in ((256, 192), (1024, 896), (hard, min(16_384, hard - hard // 8))):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert connection_limit() == expected
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft <= hard


def _ask(server, method, path):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    client.request(method, path, BODY if method == "POST" else None, {"Content-Type": "application/json"})
    answer = client.getresponse()
    try:
        return answer.status, json.loads(answer.read())["error"]
    finally:
        client.close()


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        *(
            ("POST", f"/{name}", f"POST /v1/{name}")
            for name in ("chat/completions", "completions", "messages", "responses", "embeddings")
        ),
        ("GET", "/models", "GET /v1/models"),
        ("POST", "/v1/chat/completions/", "POST /v1/chat/completions"),
        ("POST", "//v1//completions", "POST /v1/completions"),
        ("GET", "/v1/models/", "GET /v1/models"),
        ("GET", "/health/", "GET /health"),
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/V1/Chat/Completions", "POST /v1/chat/completions"),
        ("POST", "/v1/chat", "POST /v1/chat/completions"),
        ("POST", "/v1/chat/completion", "POST /v1/chat/completions"),
        ("GET", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/api/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/openai/v1/embeddings", "POST /v1/embeddings"),
        ("POST", "/openai/deployments/gpt-4o/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/completion", "POST /v1/completions"),
        ("POST", "/generate", "POST /v1/completions"),
    ],
)
def test_an_address_that_is_almost_right_is_answered_with_the_right_one(make_server, method, path, meant):
    status, error = _ask(make_server(), method, path)
    assert (status, error["code"]) == (404, "route_not_found")
    assert f"Did you mean {meant}? " in error["message"]


@pytest.mark.parametrize("path", ["/nope", "/wp-login.php", "/v1/quotes", "/x" * 200])
def test_an_address_that_is_like_none_suggests_none(make_server, path):
    status, error = _ask(make_server(), "POST", path)
    assert (status, error["code"]) == (404, "route_not_found")
    assert "Did you mean" not in error["message"] and "GET /docs" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET"), ("PUT", "/v1/completions", "POST")],
)
def test_a_wrong_method_is_answered_with_the_right_one(make_server, method, path, allowed):
    status, error = _ask(make_server(), method, path)
    assert (status, error["code"]) == (405, "method_not_allowed")
    assert f"does not support {method}. Send {allowed}" in error["message"]


def test_a_suggestion_has_the_path_of_the_proxy(make_server):
    status, error = _ask(make_server(root_path="/llm"), "POST", "/llm/chat/completions")
    assert status == 404 and "Did you mean POST /llm/v1/chat/completions?" in error["message"]
