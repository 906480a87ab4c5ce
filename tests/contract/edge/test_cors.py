"""Web pages of other origins: which may ask, and what a browser is told."""

from __future__ import annotations

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


def test_what_is_no_list_of_header_names_is_not_sent_back(make_stage):
    stage = make_stage(allowed_origins=(CHAT,))
    for names in ("a b", "x:y", "x" * 3000):
        answer = _send(stage, "OPTIONS", "/v1/completions", headers={**ASKS, "Access-Control-Request-Headers": names})
        assert answer.status_code == 204 and "access-control-allow-headers" not in answer.headers


def test_options_that_is_no_question_of_a_browser_stays_what_it_was(make_stage):
    stage = make_stage(allowed_origins=(CHAT,))
    assert _send(stage, "OPTIONS", "/v1/completions", headers={"Origin": CHAT}).status_code == 405
