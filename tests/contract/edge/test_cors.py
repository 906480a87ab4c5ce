"""Web pages of other origins: which may ask, and what a browser is told."""

from __future__ import annotations

import socket

import anyio
import pytest

CHAT = "https://chat.example.org"
ASKS = {
    "Origin": CHAT,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}
BODY = {"prompt": "x", "max_tokens": 2}


def _send(stage, method, path, **options):
    async def send():
        async with stage.client() as client:
            return await client.request(method, path, **options)

    return anyio.run(send)


def _cors(response):
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


@pytest.mark.slow
def test_an_allowed_origin_may_ask_without_a_key_what_it_may_send(make_stage):
    stage = make_stage(api_key=("k",), allowed_origins=(CHAT, "http://localhost:3000"))
    answer = _send(stage, "OPTIONS", "/v1/chat/completions", headers=ASKS)
    assert (answer.status_code, answer.content) == (204, b"")
    told = _cors(answer)
    assert told["access-control-allow-origin"] == CHAT
    assert "POST" in told["access-control-allow-methods"]
    assert told["access-control-allow-headers"] == ASKS["Access-Control-Request-Headers"]
    assert "access-control-allow-credentials" not in told
    assert answer.headers["vary"] == "Origin"
    assert stage.engine.requests == []


def test_every_answer_can_be_read_by_the_page_errors_and_streams_too(make_stage):
    stage = make_stage(api_key=("k",), allowed_origins=(CHAT,))
    key = {"Authorization": "Bearer k"}
    for status, path, options in (
        (200, "/v1/completions", {"json": BODY, "headers": key}),
        (200, "/v1/completions", {"json": {**BODY, "stream": True}, "headers": key}),
        (400, "/v1/completions", {"json": {**BODY, "n": 0}, "headers": key}),
        (401, "/v1/completions", {"json": BODY}),
        (404, "/nope", {"headers": key}),
        (405, "/health", {"headers": key}),
    ):
        options["headers"] = {**options.get("headers", {}), "Origin": CHAT}
        answer = _send(stage, "POST", path, **options)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == CHAT
        exposed = answer.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed and "retry-after" in exposed


@pytest.mark.parametrize("origin", ["https://evil.example", "http://chat.example.org", f"{CHAT}:8443", "null", ""])
def test_another_origin_gets_no_word_of_permission(make_stage, origin):
    stage = make_stage(allowed_origins=(CHAT,))
    asked = _send(stage, "OPTIONS", "/v1/completions", headers={**ASKS, "Origin": origin})
    assert (asked.status_code, _cors(asked)) == (405, {})
    answer = _send(stage, "GET", "/v1/models", headers={"Origin": origin})
    assert (answer.status_code, _cors(answer)) == (200, {})
    assert answer.headers["vary"] == "Origin"  # a cache must not give it to a page of the allowed one


def test_any_origin_may_be_allowed(make_stage):
    stage = make_stage(allowed_origins=("*",))
    answer = _send(stage, "OPTIONS", "/v1/completions", headers={**ASKS, "Origin": "null"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (204, "*")
    assert "vary" not in _send(stage, "GET", "/v1/models").headers


def test_invalid_lists_of_header_names_are_not_sent_back(make_stage):
    stage = make_stage(allowed_origins=(CHAT,))
    for names in ("a b", "x:y", "x" * 3000):
        answer = _send(stage, "OPTIONS", "/v1/completions", headers={**ASKS, "Access-Control-Request-Headers": names})
        assert answer.status_code == 204 and "access-control-allow-headers" not in answer.headers


def test_options_that_is_no_question_of_a_browser_stays_unchanged(make_stage):
    stage = make_stage(allowed_origins=(CHAT,))
    assert _send(stage, "OPTIONS", "/v1/completions", headers={"Origin": CHAT}).status_code == 405


FORM = {"files": {"file": ("x.jsonl", b"{}")}, "data": {"purpose": "batch"}}
# What a browser says of the page that a request comes from, and whether that page may cause anything.
PAGES = {
    "no browser": ({}, True),
    "the own page": ({"Sec-Fetch-Site": "same-origin", "Origin": "https://llm.example.org"}, True),
    "an address typed": ({"Sec-Fetch-Site": "none"}, True),
    "an older browser on the own page": ({"Origin": "http://127.0.0.1"}, True),
    "the own page behind a proxy": ({"Origin": "http://llm.lan:81", "X-Forwarded-Host": "LLM.lan:81"}, True),
    "the own page behind a proxy that adds the port": (
        {"Origin": "https://llm.lan", "X-Forwarded-Host": "llm.lan:443, 10.0.0.1"},
        True,
    ),
    "an allowed page": ({"Sec-Fetch-Site": "cross-site", "Origin": CHAT}, True),
    "an allowed page of an older browser": ({"Origin": CHAT}, True),
    "a foreign page": ({"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}, False),
    "a foreign page that hides its origin": ({"Sec-Fetch-Site": "cross-site"}, False),
    "a frame without an origin": ({"Origin": "null"}, False),
    "a page of another port": ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"}, False),
    "an older browser on another port": ({"Origin": "http://127.0.0.1:3000"}, False),
    "a foreign page that names this host": ({"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1"}, False),
}


@pytest.mark.parametrize("page", PAGES)
def test_only_allowed_pages_may_cause_anything(make_stage, page, tmp_path):
    headers, may = PAGES[page]
    stage = make_stage("ok", allowed_origins=(CHAT,), admin_api_key="boss", batch_dir=str(tmp_path))
    boss = {"Authorization": "Bearer boss"}
    for method, path, options in (
        ("POST", "/v1/files", FORM),
        ("POST", "/v1/batches/batch_0/cancel", {}),
        ("POST", "/v1/responses/resp_0/cancel", {}),
        ("DELETE", "/v1/files/file-0", {}),
        ("POST", "/v1/messages", {"content": b"{", "headers": {"Content-Type": "text/plain"}}),
        ("POST", "/admin/reset_prefix_cache", {"headers": boss}),
    ):
        answer = _send(stage, method, path, **{**options, "headers": {**options.get("headers", {}), **headers}})
        assert (answer.status_code != 403) == may, (path, answer.text)
        if not may:
            error = answer.json()["error"]
            assert "--allowed-origins" in error["message"] and error["type"] == "permission_error"
    assert _send(stage, "GET", "/v1/models", headers=headers).status_code == 200
    assert stage.engine.resets == may


def test_the_error_names_the_option_and_the_origin(make_stage):
    error = _send(make_stage(), "POST", "/v1/completions", json=BODY, headers={"Origin": "https://a.example:8443"})
    assert error.json()["error"]["code"] == "origin_not_allowed"
    assert "--allowed-origins 'https://a.example:8443'" in error.json()["error"]["message"]
    every = make_stage(allowed_origins=("*",))
    page = {"Origin": "null", "Sec-Fetch-Site": "cross-site"}
    assert _send(every, "POST", "/v1/completions", json=BODY, headers=page).status_code == 200


def test_a_foreign_page_is_refused_before_its_body_is_read(make_server):
    server = make_server()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n")
        raw.sendall(b"Content-Length: 9999\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 403 ")
