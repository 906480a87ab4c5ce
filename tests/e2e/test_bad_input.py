"""Invalid requests over a real socket: a 4xx in OpenAI's exact shape that names the field, and the server serves on."""

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


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_named(tp1, stream):
    """Limits of the model, and one other; tests/contract/test_bad_input.py has every field."""
    for fields in ({"prompt": [4096]}, {"stop_token_ids": [4096]}, {"logit_bias": {"4096": 1}}, {"temperature": 2.1}):
        body = {"prompt": "x", "stream": stream} | fields
        refused(tp1.client.post(COMPLETIONS, json=body), param=next(iter(fields)))


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


def test_other_content_types_and_sizes(tp1):
    refused(tp1.client.post(COMPLETIONS, content=b"x", headers={"Content-Type": "text/plain"}), 415)
    content = b'{"prompt": "' + b"x" * 17 * 2**20 + b'"}'
    refused(tp1.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), 413)


@pytest.mark.parametrize(
    "raw",
    [
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http(tp1, raw):
    with socket.create_connection(("127.0.0.1", tp1.port), timeout=60) as connection:
        connection.sendall(raw)
        answer = connection.recv(65536)
    assert not answer or b" 4" in answer.split(b"\r\n")[0], answer
