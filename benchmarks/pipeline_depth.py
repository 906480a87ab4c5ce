"""Decode steps one after the other, and each scheduled while the one before runs.

    python -m benchmarks.pipeline_depth [--sequences N ...] [--rounds N] [--ranks N] [--shape 0.5b] [--threads N]
    python -m benchmarks.pipeline_depth --device-ms 5 [--sequences N ...] [--rounds N]

Both ways take turns in each round, on ranks that are loaded once. Each round decodes `--tokens` tokens of every
sequence, as the engine's loop does: schedule, build, submit, encode the events of the answer before, wait for the
answer. With `--device-ms` the ranks are a device that takes so long for every step and no processor time. Figures are
milliseconds of wall time per step: the median over rounds, and the least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np

from benchmarks.checkpoint import ensure
from oarlock.engine.config import EngineConfig, WorkerConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.ipc import messages
from oarlock.engine.sampling_params import SamplingParams
from oarlock.engine.simulation.simulated_ranks import replica_info
from oarlock.engine.types import Request, TokenEvents
from oarlock.workers.executor import Executor, start_executor
from oarlock.workers.protocol import StepMetadata, StepOutput, empty_step

PROMPT, BLOCK_SIZE = 64, 32


class SimulatedDevice:
    """Ranks on a device that runs steps in order, each for the same time, and answers with one token."""

    rank_pids: tuple[int, ...] = ()
    step_times_ns: tuple[int, ...] = ()
    max_in_flight = best_in_flight = 2

    def __init__(self, config: WorkerConfig, step_s: float) -> None:
        assert config.num_kv_blocks is not None
        self.config = config
        self.info = replica_info(config, config.num_kv_blocks, 32_000)
        self._step_s = step_s
        self._running: deque[tuple[float, StepMetadata]] = deque()  # with the time of their ends
        self._free_s = 0.0  # when the last of them ends

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        self._free_s = max(self._free_s, time.monotonic()) + self._step_s
        self._running.append((self._free_s, step))

    def send_masks(self, bits: np.ndarray) -> None:
        """Masks decide nothing here, and no step waits for them."""

    def collect(self) -> StepOutput:
        end_s, step = self._running.popleft()
        time.sleep(max(0.0, end_s - time.monotonic()))
        rows = len(step.logits_indices)
        return StepOutput(step.step_id, np.full(rows, 5, np.int32), np.ones(rows, np.uint8))

    def ping(self) -> None:
        return None

    kv_reports = None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        self._running.clear()


def seconds_per_step(executor: Executor, depth: int, num_seqs: int, num_tokens: int) -> float:
    """Wall time per decode step while every sequence decodes. Their lengths are spread over a block."""
    config = EngineConfig(executor.config, enable_prefix_caching=False, pipeline_depth=depth)
    core = EngineCore(config, executor, time.monotonic)
    for number in range(num_seqs):
        prompt = tuple(5 + (number * 31 + index * 7) % 1000 for index in range(PROMPT + number % BLOCK_SIZE))
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, seed=number)
        core.scheduler.add(Request(number, prompt, params), 0.0)
    outbox = TokenEvents()
    full: list[float] = []  # when there was an answer with a token for each sequence, and not the last
    while core.scheduler.has_work or core.num_in_flight:
        output = core.begin()
        messages.events(outbox)
        outbox = TokenEvents()
        if core.num_in_flight and (output is None or core.is_full):
            outbox = core.finish()
            if len(outbox) == num_seqs and not any(event.finish_reason for event in outbox.others):
                full.append(time.monotonic())
    return (full[-1] - full[0]) / (len(full) - 1)


def round_trip_us(executor: Executor, count: int = 2000) -> float:
    """Median time that a step takes in which ranks compute nothing: packing, two wake-ups, reading on both sides."""
    times = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        executor.submit(empty_step(1))
        executor.collect()
        times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device-ms", type=float, help="of one step of a simulated device")
    arguments = parser.parse_args()
    most = max(arguments.sequences)
    simulated = arguments.device_ms is not None
    config = WorkerConfig(
        "none" if simulated else str(ensure(arguments.shape)),
        tensor_parallel_size=arguments.ranks,
        max_model_len=PROMPT + BLOCK_SIZE + arguments.tokens + 32,
        max_num_seqs=most,
        max_num_batched_tokens=max(2048, (PROMPT + BLOCK_SIZE) * most if simulated else 0),
        block_size=BLOCK_SIZE,
        num_kv_blocks=most * ((PROMPT + arguments.tokens) // BLOCK_SIZE + 3),
        num_threads=arguments.threads,
        log_level="WARNING",
    )
    ways = simulated_ways(config, arguments.device_ms / 1e3) if simulated else real_ways(config)
    try:
        print(f"| sequences | {' | '.join(ways)} |\n|---:|{'---:|' * len(ways)}")
        for num_seqs in arguments.sequences:
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(arguments.rounds):
                for name, (executor, depth) in ways.items():
                    times[name].append(seconds_per_step(executor, depth, num_seqs, arguments.tokens) * 1e3)
            cells = [f"{statistics.median(some):.2f} ({min(some):.2f})" for some in times.values()]
            print(f"| {num_seqs} | {' | '.join(cells)} |", flush=True)
        if not simulated:
            (executor, _), *_ = ways.values()
            print(f"A step without sequences takes {round_trip_us(executor):.0f} µs from its submission to the answer.")
    finally:
        for executor in {id(executor): executor for executor, _ in ways.values()}.values():
            executor.close()


def simulated_ways(config: WorkerConfig, step_s: float) -> dict[str, tuple[Executor, int]]:
    """Ways to run steps by name, each an executor and its pipeline depth."""
    device = SimulatedDevice(config, step_s)
    return {"device": (device, 1), "device, ahead": (device, 2)}


def real_ways(config: WorkerConfig) -> dict[str, tuple[Executor, int]]:
    ranks = start_executor(config, lambda *progress: None)
    return {"ranks": (ranks, 1), "ranks, ahead": (ranks, 2)}


if __name__ == "__main__":
    main()
