"""Delay of one client's first tokens by another client's flood, over HTTP.

    python -m benchmarks.client_shares [--flood N] [--requests N] [--rounds N] [--shape 0.5b] [--threads N]

A quiet client asks one request after the other. Beside it another one asks, in a closed loop of as many requests

    share            as are half of the sequences that may run: the rest is free for the quiet one
    flood            as `--flood` says, far more than may run
    flood, one key   the same with the quiet one's key: they are one client then, and nothing is shared out; a quarter
                     of the requests, as each waits for the whole flood

The ways take turns in each round on one server with two API keys. Milliseconds until the first token of the quiet
client's requests, of all rounds together; ratios are to "share".
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoint import SHAPES, ensure, prompts
from benchmarks.environments import ROOT
from benchmarks.load import GivenPrompts
from benchmarks.systems.system import SERVED_NAME, HttpSystem, clean_environment
from oarlock.server.bench.client.http_stream import HttpClient, Target
from oarlock.server.bench.client.request import RequestForm
from oarlock.server.bench.metrics import Sample
from oarlock.server.bench.run import LoadRun, Schedule

QUIET, LOUD = "quiet-client", "loud-client"  # API keys
MAX_NUM_SEQS = 16
QUIET_TOKENS, LOUD_TOKENS = (64, 8), (128, 64)  # of a prompt and of its answer


@dataclass(frozen=True, slots=True)
class Way:
    """Load that runs beside the quiet client."""

    name: str
    concurrency: int
    key: str
    requests: int  # of the quiet client, in a round


def ways(flood: int, requests: int) -> list[Way]:
    return [
        Way("share", MAX_NUM_SEQS // 2, LOUD, requests),
        Way("flood", flood, LOUD, requests),
        Way("flood, one key", flood, QUIET, -(-requests // 4)),
    ]


def load(client: HttpClient, work: list[list[int]], output_tokens: int, concurrency: int) -> LoadRun:
    schedule = Schedule(concurrency=concurrency, count=len(work))
    return LoadRun(client, RequestForm(SERVED_NAME), GivenPrompts(work, output_tokens), schedule, lambda _: None)


async def first_tokens(url: str, way: Way, vocab_size: int, seed: int) -> list[float]:
    """Seconds until the first token of each of the quiet client's requests."""
    quiet, other = HttpClient(Target.parse(url), QUIET), HttpClient(Target.parse(url), way.key)
    length, output_tokens = LOUD_TOKENS
    endless = prompts(50 * way.requests + 20 * way.concurrency, length, vocab_size, 2 * seed)
    beside = asyncio.create_task(load(other, endless, output_tokens, way.concurrency).measure())
    try:
        await asyncio.sleep(2.0)  # until all of it is asked
        length, output_tokens = QUIET_TOKENS
        work = prompts(way.requests, length, vocab_size, 2 * seed + 1)
        measured = await load(quiet, work, output_tokens, 1).measure()
        if beside.done():
            raise RuntimeError(f"{way.name}: the other client was done before the quiet one")
        return [_until_first(sample) for sample in measured.samples]
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        quiet.close()
        other.close()


def _until_first(sample: Sample) -> float:
    if sample.failure is not None:
        raise RuntimeError(f"{sample.failure}: {sample.detail}")
    return sample.ttft_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flood", type=int, default=64, help="requests at a time")
    parser.add_argument("--requests", type=int, default=12, help="of the quiet client, in each round of each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="0.5b", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    command = [sys.executable, "-P", "-m", "oarlock", "serve", str(ensure(arguments.shape)), "--port", "{port}"]
    command += ["--served-model-name", SERVED_NAME, "--api-key", QUIET, LOUD, "--max-model-len", "512"]
    command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--num-threads", str(arguments.threads)]
    environment = clean_environment(arguments.threads, PYTHONPATH=str(ROOT))
    del environment["OMP_NUM_THREADS"]
    server = HttpSystem("oarlock", "Oarlock", {}, command, environment, ROOT)
    found: dict[str, list[float]] = {way.name: [] for way in ways(arguments.flood, arguments.requests)}
    try:
        for turn in range(arguments.rounds + 1):
            for way in ways(arguments.flood, arguments.requests):
                seconds = asyncio.run(first_tokens(server.url, way, SHAPES[arguments.shape]["vocab_size"], 10 * turn))
                if turn:  # the first round warms up
                    found[way.name] += seconds
    finally:
        server.close()
    print(table(found))


def table(found: dict[str, list[float]]) -> str:
    """Table in Markdown."""
    lines = ["| beside | mean, ms | p50 | p95 | mean / share | p95 / share |", "|---|" + "---:|" * 5]
    share = np.array(found["share"]) * 1e3
    for name, seconds in found.items():
        values = np.array(seconds) * 1e3
        mean, p95 = values.mean(), np.percentile(values, 95)
        ratios = f"{mean / share.mean():.2f} | {p95 / np.percentile(share, 95):.2f}"
        lines.append(f"| {name} | {mean:.0f} | {np.median(values):.0f} | {p95:.0f} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
