"""Admin routes: the keys they need, what clients receive after an abort, a drain, a reset of the prefix cache."""

from __future__ import annotations

import asyncio
import json

import anyio
import pytest

from oarlock.base.errors import StartupError

BOSS = {"Authorization": "Bearer boss"}
PATHS = ("/admin/abort", "/admin/drain", "/admin/reset_prefix_cache")
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def _post(stage, path, body=None, headers=BOSS):
    async def send():
        async with stage.client() as client:
            return await client.post(path, json=body, headers=headers)

    return anyio.run(send)


@pytest.fixture
def stage(make_stage):
    """An engine that pauses after two tokens of each answer."""
    return make_stage("one two three four", pause_after=2, api_key=("user",), admin_api_key="boss")


@pytest.mark.parametrize("path", PATHS)
def test_only_the_admin_key_opens_them(make_stage, stage, path):
    closed = make_stage(api_key=("user",))
    cases = [
        (stage, None, 401, "authentication_error", "invalid_api_key"),
        (stage, "Bearer ", 401, "authentication_error", "invalid_api_key"),
        (stage, "Basic boss", 401, "authentication_error", "invalid_api_key"),
        (stage, "Bearer user", 403, "permission_error", "not_admin_key"),
        (stage, "Bearer bos", 403, "permission_error", "not_admin_key"),
        (closed, "Bearer user", 403, "permission_error", "admin_disabled"),
        (closed, None, 403, "permission_error", "admin_disabled"),
        (make_stage(), "Bearer ", 403, "permission_error", "admin_disabled"),
    ]
    for target, key, status, kind, code in cases:
        answer = _post(target, path, {"all": True}, {} if key is None else {"Authorization": key})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (status, kind, code), key
        assert set(error) == {"message", "type", "param", "code"}
        assert ("--admin-api-key" in error["message"]) == (code == "admin_disabled")
        assert not target.state.stop.is_set()
        assert not target.engine.resets
    assert _post(stage, path, {"all": True}).status_code in (200, 202)


def test_the_admin_key_opens_nothing_else_and_is_never_a_clients(make_stage, stage):
    assert _post(stage, "/v1/completions", {"prompt": "x"}).status_code == 401
    assert _post(stage, "/admin/nope").status_code == 404
    assert _post(stage, "/admin/nope", headers={}).status_code == 401
    with pytest.raises(StartupError, match="The admin key is also one of the API keys"):
        make_stage(api_key=("a", "b"), admin_api_key="b")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_id"),
        ({"all": False}, "request_id"),
        ({"request_id": None, "all": None}, "request_id"),
        ({"request_id": "a", "all": True}, "all"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"all": 1}, "all"),
        ([], None),
    ],
)
def test_wrong_bodies_are_refused_by_name(stage, body, param):
    answer = _post(stage, "/admin/abort", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_id_is_not_found(stage):
    answer = _post(stage, "/admin/abort", {"request_id": "nobody"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "request_id", "request_not_found")
    assert _post(stage, "/admin/abort", {"all": True}).json() == {"aborted": 0}


async def _begun(stage, num_requests):
    """Wait until `num_requests` answers have all the text that they get."""
    async with asyncio.timeout(40):
        while len(stage.engine.requests) < num_requests or not all(
            choice.num_tokens == 2 for generation in stage.state.async_llm.open for choice in generation.choices
        ):
            await asyncio.sleep(0.005)


def _end_of(answer):
    """The text and the reason of a whole or a streamed answer's first choice."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choice = answer.json()["choices"][0]
        return choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"]
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return text, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "cmpl-"),
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
    ],
)
def test_an_abort_leaves_the_text_so_far(stage, tokenizer, path, body, prefix, stream):
    begun = tokenizer.decode(tokenizer.encode("one two three four", add_special_tokens=False)[:2])

    async def scenario():
        async with stage.client() as client, asyncio.TaskGroup() as tasks:

            def ask(name):
                headers = {"Authorization": "Bearer user", "X-Request-Id": name}
                return tasks.create_task(client.post(path, json=body | {"stream": stream}, headers=headers))

            answers = [ask(name) for name in ("first", "second", "third", "fourth")]
            await _begun(stage, 4)
            for name, wanted in (("first", 1), (f"{prefix}second", 1), ("first", None)):
                aborted = await client.post("/admin/abort", json={"request_id": name}, headers=BOSS)
                assert aborted.json().get("aborted") == wanted
            assert [_end_of(await answer) for answer in answers[:2]] == [(begun, "abort")] * 2
            assert not answers[2].done()
            aborted = await client.post("/admin/abort", json={"all": True}, headers=BOSS)
            assert aborted.json() == {"aborted": 2}
            assert [_end_of(await answer) for answer in answers[2:]] == [(begun, "abort")] * 2

    asyncio.run(scenario())
    assert sorted(stage.engine.aborted) == [1, 2, 3, 4]
    assert stage.state.async_llm.open == set()
    assert stage.state.num_in_flight == 0
    assert stage.counters.finished == {"stop": 0, "length": 0, "timeout": 0, "abort": 4, "error": 0}


def test_an_abort_before_the_first_token_is_an_empty_answer(make_stage):
    stage = make_stage(pause_after=0, admin_api_key="boss")

    async def scenario():
        async with stage.client() as client, asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(client.post("/v1/completions", json={"prompt": "x", "n": 2, "stream": stream}))
                for stream in (False, True)
            ]
            async with asyncio.timeout(40):
                while len(stage.engine.requests) < 4:
                    await asyncio.sleep(0.005)
            assert (await client.post("/admin/abort", json={"all": True}, headers=BOSS)).json() == {"aborted": 2}
            plain, streamed = [await answer for answer in answers]
        choices = plain.json()["choices"]
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("", "abort")] * 2
        assert streamed.text.count('"finish_reason":"abort"') == 2

    asyncio.run(scenario())


def test_a_drain_refuses_new_requests_and_still_serves_the_operator(stage):
    answer = _post(stage, "/admin/drain")
    assert (answer.status_code, answer.json()) == (202, {"status": "draining", "open": 0})
    assert stage.state.stop.is_set()
    refused = _post(stage, "/v1/completions", {"prompt": "x"}, {"Authorization": "Bearer user"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
    assert refused.headers["Retry-After"]
    assert _post(stage, "/admin/abort", {"all": True}).json() == {"aborted": 0}


def test_a_reset_reaches_the_engine(stage):
    assert _post(stage, "/admin/reset_prefix_cache").json() == {"reset": True, "blocks": 40}
    assert stage.engine.resets == 1
