"""One round of the closed loop, with the same measures for servers and for engines that are driven without one.

TTFT, TPOT, ITL, E2EL   as `oarlock bench serve` defines them; its client sends the requests
decode                  tokens per second while every client's first request decodes: after the last of them has its
                        first token, and before the first of them ends
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oarlock.server.bench import metrics
from oarlock.server.bench.client import RequestForm
from oarlock.server.bench.http_stream import HttpClient, Target
from oarlock.server.bench.serve import LoadRun, Measured, Schedule, run_until_done
from oarlock.server.bench.workload import WorkloadTurn

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


@dataclass(frozen=True, slots=True)
class GivenPrompts:
    """A workload of prompts that are given: every conversation is one request."""

    prompts: list[list[int]]
    output_tokens: int

    def conversation(self, number: int) -> Sequence[WorkloadTurn]:
        prompt = self.prompts[number]
        return [WorkloadTurn(prompt, len(prompt), self.output_tokens)]


def run(
    url: str,
    model: str,
    work: list[list[int]],
    concurrency: int,
    output_tokens: int,
    extra: dict[str, Any] | None = None,
) -> Report:
    """Run `concurrency` clients, each sending its next prompt when its last is answered, until `work` is done.

    `extra`: more fields of each body. Raises `RuntimeError` for an answer of any other number of tokens than asked for.
    """
    measured = run_until_done(_measure(url, model, GivenPrompts(work, output_tokens), concurrency, extra or {}))
    if measured.is_interrupted:
        raise KeyboardInterrupt
    return report([_checked(sample) for sample in measured.samples], concurrency, measured.duration_s)


async def _measure(url: str, model: str, prompts: GivenPrompts, concurrency: int, extra: dict[str, Any]) -> Measured:
    client = HttpClient(Target.parse(url))
    form, schedule = RequestForm(model, extra=extra), Schedule(concurrency=concurrency, count=len(prompts.prompts))
    try:
        return await LoadRun(client, form, prompts, schedule, lambda _: None).measure()
    finally:
        client.close()


def _checked(sample: metrics.Sample) -> Sample:
    if sample.failure is not None:
        raise RuntimeError(f"{sample.failure}: {sample.detail}")
    if sample.output_tokens != sample.asked_tokens or sample.counted_by != "usage":
        counted = f"{sample.output_tokens} by {sample.counted_by}"
        raise RuntimeError(f"asked for {sample.asked_tokens} tokens, got {counted}")
    times = metrics.chunk_times(sample).tolist()
    return Sample(sample.output_tokens, sample.sent_s, times, times[-1])
