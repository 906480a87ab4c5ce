"""While a large body is read, or a large answer is written, the event loop keeps running: others have their turns.

Turns are counted, a millisecond apart at least: a loop that did all of it by itself gave others 13 at most.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
MEGABYTE = 10**6
FEW_TURNS = 25
MANY = 300_000  # values, ten times as many as are read at once


async def with_turns(work):
    """The result of `work`, and how many turns other tasks had meanwhile."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    other = asyncio.create_task(count())
    try:
        return await work, turns
    finally:
        other.cancel()


BODIES = {
    "numbers of 299 digits": (b'{"prompt":"x","y":[' + b",".join([b"1" * 299] * 15_000) + b"]}", 200),
    "text": (b'{"prompt":"' + b"word " * MEGABYTE + b'"}', 400),
    "ids": (b'{"prompt":[' + b",".join(b"%d" % (i % 4096) for i in range(MANY)) + b"]}", 400),
    "empty lists": (b'{"prompt":"x","y":[' + b",".join([b"[]"] * MANY) + b"]}", 200),
    "wrong ids": (b'{"prompt":[' + b",".join([b"-1"] * MANY) + b"]}", 400),
    "unknown fields": (b'{"prompt":"x",' + b",".join(b'"k%d":0' % i for i in range(MANY // 3)) + b"}", 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_does_not_stop_the_loop(make_stage, name):
    body, status = BODIES[name]
    stage = make_stage()

    async def scenario():
        async with stage.client(headers=JSON, timeout=120) as client:
            return await with_turns(client.post("/v1/completions", content=body))

    response, turns = asyncio.run(scenario())
    assert response.status_code == status, response.text[:200]
    assert turns > FEW_TURNS
    assert len(json.dumps(response.json())) < 4096


NUMBERS = [(i * 7) % 4000 for i in range(MANY)]
LARGE_ANSWERS = {
    "tokens with their texts": ("/tokenize", {"prompt": "a b c " * 60_000, "return_token_strs": True}),
    "text": ("/detokenize", {"tokens": NUMBERS}),
    "rendered prompts": ("/v1/completions/render", {"prompt": [NUMBERS[:2000]] * 150}),
    "echo": ("/v1/completions", {"prompt": NUMBERS, "echo": True, "max_tokens": 0}),
    "conversation": ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "word " * 200}] * 1300}),
}


@pytest.mark.parametrize("name", LARGE_ANSWERS)
def test_a_large_answer_does_not_stop_the_loop(make_stage, name):
    path, body = LARGE_ANSWERS[name]
    stage = make_stage(info=replace(make_stage().engine.info, max_model_len=2**21, num_blocks=2**17))
    content = json.dumps(body).encode()

    async def scenario():
        async with stage.client(headers=JSON, timeout=120) as client:
            return await with_turns(client.post(path, content=content))

    response, turns = asyncio.run(scenario())
    assert response.status_code == 200, response.text[:200]
    assert turns > FEW_TURNS
    assert len(response.content) > MEGABYTE
