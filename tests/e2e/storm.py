"""Clients that disconnect: thirty-two at a time, streaming or waiting, many leaving in the middle of an answer.

Counts how the requests ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import httpx


async def storm(url: str, seconds: float, clients: int = 32, seed: int = 0) -> Counter[str]:
    """Run `clients` for `seconds`. Ends are `finished`, `left` (by us) or `refused`; anything else raises."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:

        async def user(number: int) -> None:
            draw = random.Random(f"storm-{seed}-{number}")
            while time.monotonic() < until:
                body = {
                    "prompt": [draw.randrange(3, 4096) for _ in range(draw.randrange(1, 200))],
                    "max_tokens": draw.randrange(1, 80),
                    "temperature": draw.choice([0, 1]),
                    "n": draw.choice([1, 1, 2]),
                    "ignore_eos": True,
                }
                leaves_after = draw.randrange(0, 30) if draw.random() < 0.5 else None
                ask = streamed if draw.random() < 0.7 else waited
                ends[await ask(client, body, leaves_after)] += 1

        async with asyncio.TaskGroup() as users:
            for number in range(clients):
                users.create_task(user(number))
    return ends


async def streamed(client: httpx.AsyncClient, body: dict, leaves_after: int | None) -> str:
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


async def waited(client: httpx.AsyncClient, body: dict, leaves_after: int | None) -> str:
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
    assert [choice["finish_reason"] for choice in choices] == ["length"] * body["n"]
    return "finished"
