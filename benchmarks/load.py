"""A closed loop of streaming clients against any OpenAI-compatible server, with the field's usual measures.

    TTFT     from sending the request to its first chunk of text
    TPOT     (end to end - TTFT) / (output tokens - 1), one figure per request
    ITL      the gap between one chunk and the next, every gap of every request
    E2EL     from sending the request to the end of its stream
    decode   tokens per second while every client's first request decodes: after the last of them has its first token,
             and before the first of them ends

Imports nothing of the server's.

    python -m benchmarks.load --url http://127.0.0.1:8000 --concurrency 1 8 32
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoint import prompts

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Sample:
    """One request, on a clock in seconds: when it was sent, when its pieces of text came, when its stream ended."""

    output_tokens: int
    sent: float
    times: list[float]
    ended: float

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.ended - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(slots=True)
class Report:
    """One round at one concurrency. Times in milliseconds: mean and percentiles."""

    concurrency: int
    requests: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2el_ms: dict[str, float]


def summary(values: list[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; a percentile is interpolated between its two neighbours."""
    ordered = sorted(1e3 * value for value in values)
    out = {"mean": statistics.fmean(ordered)}
    for percent in PERCENTILES:
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        out[f"p{percent}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return out


def decode_speed(samples: list[Sample]) -> float | None:
    """Tokens per second of these requests together while all of them decode; None if there is no such time.

    A piece of text may hold more than one token: a request's tokens are divided evenly among its pieces.
    """
    begin = max(sample.times[0] for sample in samples)
    end = min(sample.times[-1] for sample in samples)
    if end <= begin:
        return None
    tokens = 0.0
    for sample in samples:
        pieces = sum(begin < moment <= end for moment in sample.times)
        tokens += pieces * sample.output_tokens / len(sample.times)
    return tokens / (end - begin)


def report(samples: list[Sample], concurrency: int, duration: float) -> Report:
    """The measures of one round."""
    total = sum(sample.output_tokens for sample in samples)
    first = sorted(samples, key=lambda sample: sample.sent)[:concurrency]
    gaps = [later - earlier for sample in samples for earlier, later in itertools.pairwise(sample.times)]
    return Report(
        concurrency=concurrency,
        requests=len(samples),
        duration_s=duration,
        output_tokens=total,
        output_tokens_per_s=total / duration,
        decode_tokens_per_s=decode_speed(first),
        ttft_ms=summary([sample.ttft for sample in samples]),
        tpot_ms=summary([sample.tpot for sample in samples if sample.tpot is not None] or [0.0]),
        itl_ms=summary(gaps or [0.0]),
        e2el_ms=summary([sample.ended - sample.sent for sample in samples]),
    )


async def one_request(
    client: httpx.AsyncClient, model: str, prompt: list[int], output_tokens: int, extra: dict[str, Any]
) -> Sample:
    """Send one streamed completion and time its chunks. Anything but the exact number of tokens is an error."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    sent = time.perf_counter()
    pieces: list[tuple[float, bytes]] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        # The client may share its cores with the server: while the clock runs it only notes what came when.
        async for piece in response.aiter_raw():
            pieces.append((time.perf_counter(), piece))
    ended = time.perf_counter()
    times: list[float] = []
    usage: dict[str, Any] | None = None
    for arrived, chunk in chunks_of(pieces):
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]))
        usage = chunk.get("usage") or usage
        if chunk["choices"] and chunk["choices"][0]["text"]:
            times.append(arrived)
    counted = usage["completion_tokens"] if usage else None
    if counted != output_tokens or not times:
        raise RuntimeError(f"asked for {output_tokens} tokens, the server counts {counted} in {len(times)} chunks")
    return Sample(output_tokens, sent, times, ended)


def chunks_of(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The stream's JSON chunks, each with the time at which its last byte had come."""
    rest = b""
    for arrived, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)


async def closed_loop(
    url: str, model: str, work: list[list[int]], concurrency: int, output_tokens: int, extra: dict[str, Any]
) -> Report:
    """`concurrency` clients, each sending its next prompt as soon as its last is answered, until `work` is done."""
    queue = iter(work)
    samples: list[Sample] = []
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as client:

        async def user() -> None:
            for prompt in queue:
                samples.append(await one_request(client, model, prompt, output_tokens, extra))

        started = time.perf_counter()
        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(user())
        duration = time.perf_counter() - started
    return report(samples, concurrency, duration)


def run(
    url: str,
    model: str,
    work: list[list[int]],
    concurrency: int,
    output_tokens: int,
    extra: dict[str, Any] | None = None,
) -> Report:
    """`closed_loop` for callers without an event loop. `extra`: more fields of each body."""
    return asyncio.run(closed_loop(url, model, work, concurrency, output_tokens, extra or {}))


def served_model(url: str) -> str:
    """The first name in the server's list of models."""
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        return client.get("/v1/models").raise_for_status().json()["data"][0]["id"]


def table(reports: list[Report]) -> str:
    """One line per concurrency."""
    lines = [f"{'c':>4} {'requests':>8} {'out tok/s':>10} {'TTFT p50/p90/p99 ms':>24} {'TPOT p50/p90/p99 ms':>24}"]
    for one in reports:
        ttft, tpot = ("/".join(f"{values[f'p{p}']:.1f}" for p in PERCENTILES) for values in (one.ttft_ms, one.tpot_ms))
        lines.append(f"{one.concurrency:>4} {one.requests:>8} {one.output_tokens_per_s:>10.1f} {ttft:>24} {tpot:>24}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description="Closed-loop load test of an OpenAI-compatible server."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--waves", type=int, default=2, help="requests per client")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=151_936, help="prompt ids are drawn below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few short requests, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there as well")
    args = parser.parse_args(argv)
    if args.quick:
        args.concurrency, args.input_tokens, args.output_tokens, args.vocab_size = [1, 4], 8, 8, 1024
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    model = args.model or served_model(args.url)
    reports = []
    for concurrency in args.concurrency:
        print(f"concurrency {concurrency} …", file=sys.stderr, flush=True)
        work = prompts(concurrency * args.waves, args.input_tokens, args.vocab_size, args.seed + concurrency)
        reports.append(run(args.url, model, work, concurrency, args.output_tokens))
    print(table(reports))
    if args.json:
        args.json.write_text(json.dumps([asdict(one) for one in reports], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
