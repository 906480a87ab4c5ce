"""No body and no answer holds up the event loop: what is counted is processor time of this process between two ticks,
whatever else the machine does."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}
MEGABYTE = 10**6
LIMIT_S = 0.25  # what is promised is 0.05, on a machine that does nothing else


async def longest_stall(work):
    """The result of `work`, and the most processor time that passed in this process while the loop stood still."""
    ticking = True
    longest = 0.0
    last = time.process_time()

    async def tick():
        nonlocal longest, last
        while ticking:
            now = time.process_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0.001)

    task = asyncio.create_task(tick())
    result = await work
    ticking = False
    await task
    return result, max(longest, time.process_time() - last)


def least_of_some(scenario):
    """The result of `scenario` and its shortest stall: what other threads do beside the loop only adds to it."""
    for _ in range(5):
        response, stall_s = asyncio.run(scenario())
        if stall_s < LIMIT_S:
            break
    return response, stall_s


BODIES = {
    "numbers of 299 digits": (b'{"prompt":"x","y":[' + b",".join([b"1" * 299] * 50_000) + b"]}", 200),
    "text": (b'{"prompt":"' + b"word " * (3 * MEGABYTE) + b'"}', 400),
    "ids": (b'{"prompt":[' + b",".join(b"%d" % (i % 4096) for i in range(MEGABYTE)) + b"]}", 400),
    "empty lists": (b'{"prompt":"x","y":[' + b",".join([b"[]"] * MEGABYTE) + b"]}", 200),
    "wrong ids": (b'{"prompt":[' + b",".join([b"-1"] * MEGABYTE) + b"]}", 400),
    "unknown fields": (b'{"prompt":"x",' + b",".join(b'"k%d":0' % i for i in range(300_000)) + b"}", 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_does_not_stop_the_loop(make_stage, name):
    body, status = BODIES[name]
    stage = make_stage()

    async def scenario():
        async with stage.client(headers=JSON, timeout=120) as client:
            return await longest_stall(client.post("/v1/completions", content=body))

    response, stall_s = least_of_some(scenario)
    assert response.status_code == status, response.text[:200]
    assert stall_s < LIMIT_S
    assert len(json.dumps(response.json())) < 4096


NUMBERS = [(i * 7) % 4000 for i in range(MEGABYTE)]
LARGE_ANSWERS = {
    "tokens with their texts": ("/tokenize", {"prompt": "a b c " * 150_000, "return_token_strs": True}),
    "text": ("/detokenize", {"tokens": NUMBERS}),
    "rendered prompts": ("/v1/completions/render", {"prompt": [NUMBERS[:2000]] * 500}),
    "echo": ("/v1/completions", {"prompt": NUMBERS[:400_000], "echo": True, "max_tokens": 0}),
    "conversation": ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "word " * 200}] * 4000}),
}


@pytest.mark.parametrize("name", LARGE_ANSWERS)
def test_a_large_answer_does_not_stop_the_loop(make_stage, name):
    path, body = LARGE_ANSWERS[name]
    stage = make_stage(info=replace(make_stage().engine.info, max_model_len=2**21, num_blocks=2**17))
    content = json.dumps(body).encode()

    async def scenario():
        async with stage.client(headers=JSON, timeout=120) as client:
            return await longest_stall(client.post(path, content=content))

    response, stall_s = least_of_some(scenario)
    assert response.status_code == 200, response.text[:200]
    assert stall_s < LIMIT_S
    assert len(response.content) > MEGABYTE
