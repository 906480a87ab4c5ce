"""Delay of answers under way by a long prompt, with chunks as large as steps may be and as their time allows.

    python -m benchmarks.long_prompts [--prompts N ...] [--streams N] [--rounds N] [--shape 0.5b] [--threads N]

Both ways take turns in each round, on one rank that is loaded once. Streams decode a given number of tokens; the prompt
comes when each has `--before` of them. A gap is the time between two tokens of a stream. "Whole" is the time of all
that work, the same in both ways: its ratio is what small chunks cost in throughput. Medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.checkpoint import ensure, prompts
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor

PROMPT = 64  # tokens of a stream's prompt
WAYS = {"as large as fits": 1e9, "as time allows": None}  # `EngineConfig.max_step_s`


@dataclass(frozen=True)
class Round:
    """Times of one round, in seconds."""

    idle: list[float]  # gaps of all streams before the prompt comes
    beside: list[float]  # and until it has its token
    first_token: float  # of the prompt
    whole: float


def one_round(executor: Executor, max_step_s: float | None, streams: int, length: int, before: int, seed: int) -> Round:
    config = EngineConfig(executor.config, enable_prefix_caching=False, max_step_s=max_step_s)
    core = EngineCore(config, executor, time.monotonic)
    for number, ids in enumerate(prompts(streams, PROMPT, 10_000, seed)):
        params = SamplingParams(max_tokens=stream_tokens(length, before), temperature=0.0, seed=number)
        core.scheduler.add(Request(number, tuple(ids), params), 0.0)
    last: dict[int, float] = {}
    gaps: list[tuple[float, float]] = []  # (when it ended, seconds)
    came = answered = 0.0
    begun = time.monotonic()
    while core.scheduler.has_work or core.num_in_flight:
        output = core.begin()
        for event in core.finish() if core.num_in_flight and (output is None or core.is_full) else ():
            now = time.monotonic()
            if event.request_id == streams:
                answered = now
                continue
            if event.request_id in last:
                gaps.append((now, now - last[event.request_id]))
            last[event.request_id] = now
        if not came and len(gaps) >= before * streams:
            came = time.monotonic()
            prompt = tuple(prompts(1, length, 10_000, seed + 1)[0])
            core.scheduler.add(Request(streams, prompt, SamplingParams(max_tokens=1, seed=1)), came)
    whole = time.monotonic() - begun
    idle = [seconds for ended, seconds in gaps[streams:] if ended < came]
    # the gap in which the prompt is answered counts
    beside = [seconds for ended, seconds in gaps if ended > came and ended - seconds < answered]
    return Round(idle, beside, answered - came, whole)


def stream_tokens(length: int, before: int) -> int:
    """Number of tokens with which the streams still run when the prompt is answered."""
    return 2 * before + length // 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096], help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--before", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    longest = max(arguments.prompts)
    config = WorkerConfig(
        str(ensure(arguments.shape)),
        max_model_len=longest + PROMPT + 2 * arguments.before,
        max_num_seqs=arguments.streams + 1,
        max_num_batched_tokens=2048,
        num_kv_blocks=longest // 32 + arguments.streams * (stream_tokens(longest, arguments.before) // 32 + 4) + 8,
        num_threads=arguments.threads,
        log_level="WARNING",
    )
    executor = start_executor(config, lambda *progress: None)
    try:
        print(
            "| prompt | chunks | idle gap p50, ms | beside the prompt p99 | / idle | worst | first token, s | whole |"
        )
        print("|---:|---|---:|---:|---:|---:|---:|---:|")
        for length in arguments.prompts:
            rounds: dict[str, list[Round]] = {name: [] for name in WAYS}
            for number in range(arguments.rounds):
                for name, max_step_s in WAYS.items():
                    rounds[name].append(
                        one_round(executor, max_step_s, arguments.streams, length, arguments.before, 7 * number)
                    )
            for name, some in rounds.items():
                print(f"| {length} | {name} | {_cells(some)} |", flush=True)
    finally:
        executor.close()


def _cells(rounds: list[Round]) -> str:
    idle = statistics.median(statistics.median(one.idle) for one in rounds)
    p99 = statistics.median(float(np.percentile(one.beside, 99)) for one in rounds)
    worst = statistics.median(max(one.beside) for one in rounds)
    first, whole = (
        statistics.median(values) for values in zip(*((r.first_token, r.whole) for r in rounds), strict=True)
    )
    return f"{idle * 1e3:.1f} | {p99 * 1e3:.1f} | {p99 / idle:.1f} | {worst * 1e3:.0f} | {first:.2f} | {whole:.2f} s"


if __name__ == "__main__":
    main()
