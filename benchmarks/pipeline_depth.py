"""Decode steps with the rank inside the engine's process, in one of its own, and there with steps scheduled ahead.

    python -m benchmarks.pipeline_depth [--sequences N ...] [--rounds N] [--ranks N] [--shape 0.5b] [--threads N]

The three ways take turns in each round, on ranks that are loaded once (the first of them only with one rank). Each
round decodes `--tokens` tokens of every sequence, as the engine's loop does: schedule, build, submit, encode the events
of the answer before, wait for the answer. Figures are milliseconds of wall time per step: median and least of a way.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.checkpoint import ensure
from engine.config import EngineConfig, WorkerConfig
from engine.core.engine_core import EngineCore
from engine.ipc import messages
from engine.sampling_params import SamplingParams
from engine.types import Request, TokenEvent
from workers.executor import Executor, start_executor

PROMPT = 64


def seconds_per_step(executor: Executor, depth: int, num_seqs: int, num_tokens: int) -> float:
    """Wall time per decode step once every sequence decodes."""
    config = EngineConfig(executor.config, enable_prefix_caching=False, pipeline_depth=depth)
    core = EngineCore(config, executor, time.monotonic)
    for number in range(num_seqs):
        prompt = tuple(5 + (number * 31 + index * 7) % 1000 for index in range(PROMPT))
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=number)
        core.scheduler.add(Request(number, prompt, params), 0.0)
    outbox: list[TokenEvent] = []
    steps, begun = 0, 0.0
    while core.scheduler.has_work or core.num_in_flight:
        output = core.begin()
        messages.events(outbox)
        outbox = []
        if core.num_in_flight and (output is None or core.is_full):
            outbox = core.finish()
            if len(outbox) == num_seqs:
                steps += 1
                begun = begun or time.monotonic()
    return (time.monotonic() - begun) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    most = max(arguments.sequences)
    config = WorkerConfig(
        str(ensure(arguments.shape)),
        tensor_parallel_size=arguments.ranks,
        max_model_len=PROMPT + arguments.tokens + 32,
        max_num_seqs=most,
        num_kv_blocks=most * ((PROMPT + arguments.tokens) // 32 + 2),
        num_threads=arguments.threads,
        log_level="WARNING",
    )
    own = start_executor(config, inline=False, on_progress=lambda phase, share: None)
    ways = {"own process": (own, 1), "own process, ahead": (own, 2)}
    if arguments.ranks == 1:
        inline = start_executor(config, inline=True, on_progress=lambda phase, share: None)
        ways = {"inline": (inline, 1), **ways}
    try:
        print(f"| sequences | {' | '.join(ways)} |\n|---:|{'---:|' * len(ways)}")
        for num_seqs in arguments.sequences:
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, (executor, depth) in ways.items():
                    times[name].append(seconds_per_step(executor, depth, num_seqs, arguments.tokens) * 1e3)
            cells = [f"{statistics.median(some):.2f} ({min(some):.2f})" for some in times.values()]
            print(f"| {num_seqs} | {' | '.join(cells)} |", flush=True)
    finally:
        for executor in {id(executor): executor for executor, _ in ways.values()}.values():
            executor.close()


if __name__ == "__main__":
    main()
