"""Invalid requests over a real socket: a 4xx in OpenAI's exact shape that names the field, and the server serves on."""

import json
import socket

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refused(response, status=400, param=..., code=...):
    """The error object, after a check of its exact shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 2048
    assert isinstance(error["type"], str)
    if param is not ...:
        assert error["param"] == param, error
    if code is not ...:
        assert error["code"] == code, error
    return error


@pytest.fixture(autouse=True)
def still_serving(tp1):
    yield
    assert tp1.client.get("/health").status_code == 200
    assert tp1.text("import ", max_tokens=1, temperature=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [4096]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [5] * 2049}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**40}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1 << 200}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 99, "max_tokens": 9}, "min_tokens"),
        ({"stop_token_ids": [4096]}, "stop_token_ids"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(tp1, fields, param, stream):
    body = {"prompt": "x"} | ({"stream": True} if stream and "stream_options" not in fields else {}) | fields
    refused(tp1.client.post(COMPLETIONS, json=body), param=param)


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(tp1):
    error = refused(
        tp1.client.post(COMPLETIONS, json={"prompt": [5] * 3000}), param="prompt", code="context_length_exceeded"
    )
    assert "3000" in error["message"].replace(",", "") and "2048" in error["message"].replace(",", "")


def test_an_unknown_model(tp1):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        error = refused(tp1.client.post(path, json=body | {"model": "gpt-9"}), 404, "model", "model_not_found")
        assert "gpt-9" in error["message"] and "demo" in error["message"]
    refused(tp1.client.get("/v1/models/gpt-9"), 404, code="model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x"} trailing',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": [' + b"9" * 5000 + b"]}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_request(tp1, body):
    refused(tp1.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"}))


def test_other_content_types_and_sizes(tp1):
    refused(tp1.client.post(COMPLETIONS, content=b"x", headers={"Content-Type": "text/plain"}), 415)
    refused(tp1.client.post(COMPLETIONS, content=b'{"prompt": "' + b"x" * 17 * 2**20 + b'"}', headers=JSON), 413)


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/moderations", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_no_such_route_or_method(tp1, method, path, status):
    refused(tp1.client.request(method, path), status)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], None),
    ],
)
def test_a_wrong_conversation(tp1, messages, param):
    error = refused(tp1.client.post(CHAT, json={"messages": messages}))
    assert error["param"].startswith(param or "messages")


@pytest.mark.parametrize(
    "raw",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_is_not_even_http(tp1, raw):
    with socket.create_connection(("127.0.0.1", tp1.port), timeout=60) as connection:
        connection.sendall(raw)
        answer = connection.recv(65536)
    assert not answer or b" 4" in answer.split(b"\r\n")[0], answer
