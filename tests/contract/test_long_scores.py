"""Log-probabilities of a long prompt: the engine sends them in parts, and other requests have turns in between."""

import asyncio
import json
from dataclasses import replace

import anyio
import pytest

from tests.contract.conftest import INFO

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5 + index % 200 for index in range(600)]
ASKED = [
    (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 20}),
    (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 20, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": PROMPT, "echo": True, "logprobs": 20}),
    (
        COMPLETIONS,
        {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 3, "return_token_ids": True, "n": 2},
    ),
    (CHAT, {"messages": [{"role": "user", "content": "abc " * 180}], "prompt_logprobs": 20, "return_token_ids": True}),
]


def _stage(make_stage, **options):
    return make_stage("ab", info=replace(INFO, max_model_len=8192, num_blocks=9999), **options)


def _answer(stage, path, body, **more):
    """The answer, and how many turns other tasks had until it was complete."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def send():
        other = asyncio.create_task(count())
        async with stage.client(timeout=60) as client:
            try:
                return await client.post(path, json={"temperature": 0, "max_tokens": 2, **body, **more})
            finally:
                other.cancel()

    response = anyio.run(send)
    assert response.status_code == 200, response.text
    return response, turns


def _told(response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "body"), ASKED, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_parts_make_the_answer_that_one_event_makes(make_stage, path, body):
    once, _ = _answer(_stage(make_stage), path, body)
    stage = _stage(make_stage, scored_at_once=170)
    parts, turns = _answer(stage, path, body)
    expected, got = once.json(), parts.json()
    for name in ("choices", "usage", "prompt_logprobs", "prompt_token_ids"):
        assert got.get(name) == expected.get(name), name
    num_tokens = got["usage"]["prompt_tokens"]
    scored = got.get("prompt_logprobs") or got["choices"][0].get("prompt_logprobs")
    assert scored is None or len(scored) == num_tokens
    assert scored or len(got["choices"][0]["logprobs"]["tokens"]) == num_tokens + 2
    num_numbers = num_tokens * (1 + stage.engine.requests[0].params.prompt_logprobs)
    assert turns > num_numbers / 4000, "others waited for long"
    stream, turns = _answer(stage, path, body, stream=True)
    assert turns > num_numbers / 4000
    events = _told(stream)
    for index, choice in enumerate(expected["choices"]):
        chunks = [part for event in events for part in event["choices"] if part["index"] == index]
        for source, whole in ((chunks, choice), (events, expected if index == 0 else {})):
            for name in ("prompt_logprobs", "prompt_token_ids"):
                assert [entry for part in source for entry in part.get(name, ())] == whole.get(name, [])
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for part in chunks for value in part["logprobs"][name]] == values


def test_a_small_answer_has_a_length_and_a_large_one_is_sent_as_it_is_written(make_stage):
    small, _ = _answer(_stage(make_stage), COMPLETIONS, {"prompt": PROMPT[:500], "prompt_logprobs": 20})
    large, _ = _answer(_stage(make_stage), COMPLETIONS, {"prompt": PROMPT * 5, "prompt_logprobs": 20})
    assert int(small.headers["content-length"]) == len(small.content) < 1 << 20
    assert "content-length" not in large.headers and len(large.content) > 1 << 20


def test_time_that_is_up_while_a_prompt_is_scored_is_an_error(make_stage):
    stage = _stage(make_stage, scored_at_once=100, pause_after=0)

    async def send():
        async with stage.client(timeout=60) as client:
            return await client.post(COMPLETIONS, json={"prompt": PROMPT, "prompt_logprobs": 0, "timeout": 0.2})

    response = anyio.run(send)
    assert response.status_code >= 400 and response.json()["error"]["message"]
    assert stage.engine.aborted == [1]


@pytest.mark.parametrize(
    "payload", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}], ids=lambda payload: [*payload][-1]
)
@pytest.mark.slow
def test_more_scores_than_an_answer_may_keep_are_refused(make_stage, payload):
    stage = _stage(make_stage)

    async def send(n):
        async with stage.client(timeout=60) as client:
            body = {"prompt": [[5] * 6000] * 65, "n": n, "max_tokens": 0, **payload}
            return await client.post(COMPLETIONS, json=body)

    response = anyio.run(send, 1)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, [*payload][-1])
    assert "8190000" in error["message"] and "8000000" in error["message"]
    assert stage.engine.requests == []
