"""Clients that disconnect: thirty-two at a time, streaming or waiting, many leaving in the middle of an answer.

They ask for all that changes how a step is made: penalties, grammars, bad words, logprobs, several choices. Some ask
for what they have asked before, alone: KV memory that is handed out too early would show in another text. Counts how
the requests ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import httpx

Body = dict[str, object]

NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 5}
KINDS: list[Body] = [
    {},
    {"ignore_eos": True},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.3, "ignore_eos": True},
    {"guided_json": NUMBERS},
    {"guided_regex": "[a-z]{3,9}( [a-z]{2,5}){1,30}"},  # may end at many places
    {"guided_choice": ["left", "leftmost", "right"]},
    {"bad_words": ["the end", " of the"], "logit_bias": {"11": -100, "12": 3}},
    {"logprobs": 2, "min_tokens": 5},
    {"top_p": 0.8, "top_k": 40, "stop": ["the"]},
]


async def storm(url: str, seconds: float, clients: int = 32, seed: int = 0, num_alone: int = 10) -> Counter[str]:
    """Run `clients` for `seconds`, and until ends of each kind were seen often. Ends are `finished`, `same` (the text
    of the same request alone), `left` (by us) or `refused`; anything else raises. `num_alone`: requests that are sent
    again and again."""
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:
        draw = random.Random(f"alone-{seed}")
        alone = [(body, await text_of(client, body)) for body in (body_of(draw, kind) for kind in KINDS[:num_alone])]
        until = time.monotonic() + seconds

        async def user(number: int) -> None:
            draw = random.Random(f"storm-{seed}-{number}")
            while time.monotonic() < until or not _enough(ends):
                if draw.random() < 0.15:
                    body, expected = draw.choice(alone)
                    text = await text_of(client, body)
                    assert text in (expected, None), f"{body}: {text!r} among others, {expected!r} alone"
                    ends["refused" if text is None else "same"] += 1
                    continue
                body = body_of(draw, draw.choice(KINDS)) | {"n": draw.choice([1, 1, 2])}
                leaves_after = draw.randrange(0, 30) if draw.random() < 0.5 else None
                ask = streamed if draw.random() < 0.7 else waited
                ends[await ask(client, body, leaves_after)] += 1

        async with asyncio.TaskGroup() as users:
            for number in range(clients):
                users.create_task(user(number))
    return ends


def _enough(ends: Counter[str]) -> bool:
    return ends["finished"] > 10 and ends["left"] > 10 and ends["same"] > 5


def body_of(draw: random.Random, kind: Body) -> Body:
    """A request of this kind, with a prompt of its own."""
    return kind | {
        "prompt": [draw.randrange(3, 4096) for _ in range(draw.randrange(1, 200))],
        "max_tokens": draw.randrange(5, 80),
        "temperature": draw.choice([0, 1]),
        "seed": draw.randrange(1 << 30),
    }


async def text_of(client: httpx.AsyncClient, body: Body) -> str | None:
    """The answer's text; None when it was refused because too many wait."""
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 429:
        return None
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def streamed(client: httpx.AsyncClient, body: Body, leaves_after: int | None) -> str:
    """A stream, left after so many events; or read to its end, which must be one end for each choice and `[DONE]`."""
    finished: Counter[int] = Counter()
    seen = 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code == 429:
            return "refused"
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if leaves_after is not None and seen >= leaves_after:
                return "left"
            if line == "data: [DONE]":
                assert finished == Counter(range(body["n"])), finished
                return "finished"
            if line.startswith("data: "):
                seen += 1
                for choice in json.loads(line[6:])["choices"]:
                    finished[choice["index"]] += choice["finish_reason"] is not None
    raise AssertionError("a stream ended without [DONE]")


async def waited(client: httpx.AsyncClient, body: Body, leaves_after: int | None) -> str:
    """A plain request, given up after some milliseconds or waited for."""
    timeout = httpx.Timeout(60, read=None if leaves_after is None else leaves_after / 100 + 0.001)
    try:
        response = await client.post("/v1/completions", json=body, timeout=timeout)
    except httpx.ReadTimeout:
        return "left"
    if response.status_code == 429:
        return "refused"
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert len(choices) == body["n"] and {choice["finish_reason"] for choice in choices} <= {"length", "stop"}
    return "finished"
