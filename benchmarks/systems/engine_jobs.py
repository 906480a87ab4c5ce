"""Our engine and its ranks without a server: requests of token ids in, token ids out, timed event by event.

What the server adds to a request (HTTP, JSON, text, server-sent events) is the difference to `oarlock` in the same run.
See `benchmarks/systems/system.py` for the jobs it reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from oarlock.engine.client import EngineClient
from oarlock.engine.types import Request, SamplingParams
from oarlock.server.config.settings import make_settings


async def ask(engine: EngineClient, prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """One request: when it was sent, and the time of each token."""
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0)
    sent = time.perf_counter()
    times: list[float] = []
    async for event in engine.generate(Request(engine.new_request_id(), tuple(prompt), params)):
        times += [time.perf_counter()] * len(event.token_ids)
    return {"sent": sent, "times": times}


async def run(engine: EngineClient, job: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a job, in a closed loop of `concurrency` users."""
    left = iter(job["prompts"])
    requests: list[dict[str, Any]] = []

    async def user() -> None:
        for prompt in left:
            requests.append(await ask(engine, prompt, job["output_tokens"]))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as users:
        for _ in range(job["concurrency"]):
            users.create_task(user())
    return {"duration_s": time.perf_counter() - started, "requests": requests}


async def serve(settings: dict[str, Any]) -> None:
    """Answer jobs from standard input until it ends."""
    config = make_settings(settings).engine_config(settings["model"])
    engine = await EngineClient.start(config, lambda *progress: None)
    try:
        print(json.dumps({}), flush=True)
        # Between jobs the event loop must run on: it hears the engine's heartbeats.
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await run(engine, json.loads(line))), flush=True)
    finally:
        await engine.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Answers jobs from standard input with the engine alone.")
    parser.add_argument("--settings", type=json.loads, required=True, help="the server's options by name, as JSON")
    asyncio.run(serve(parser.parse_args(argv).settings))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
