"""Cost for one rank of adding products up as several ranks do: steps of one model with and without slices, in turn.

    python -m tests.load.slice_cost MODEL [--dtype D] [--quantization Q] [--slices N] [--rounds N] [--threads N]

Whole steps with sampling: decoding 1, 8 and 32 sequences of 160 tokens, and prompts of 128 and 2,048 tokens. The ratio
of each kind is that of the least times; its range is that of the rounds. `--slices` takes another number than the shape
gives (`slices_for`): up to 8, where it divides all inputs.
"""

import argparse
import time
from collections.abc import Callable

import torch

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models import decoder
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.greedy_step import SequenceChunk, greedy_step
from oarlock.workers.runner.model_runner import ModelRunner

BLOCK_SIZE, CONTEXT = 32, 160
LEAST_S = 0.25  # of one kind of step in a round


def load(config: WorkerConfig, slices: int | None) -> ModelRunner:
    """A loaded model; `slices`: None for those of its shape."""
    plain = decoder.slices_of
    if slices is not None:
        decoder.slices_of = lambda spec, quantization: slices  # ty: ignore[invalid-assignment]
    try:
        runner = ModelRunner(config, TensorParallel.solo())
        runner.load(lambda share: None)
        runner.allocate(runner.num_blocks_that_fit())
    finally:
        decoder.slices_of = plain
    return runner


def steps() -> dict[str, StepMetadata]:
    """Steps by name."""
    per_sequence = -(-CONTEXT // BLOCK_SIZE)

    def decode(count: int) -> StepMetadata:
        blocks = [range(1 + row * per_sequence, 1 + (row + 1) * per_sequence) for row in range(count)]
        return greedy_step([SequenceChunk([5 + row], CONTEXT - 1, blocks[row]) for row in range(count)], BLOCK_SIZE,
                           range(count))  # fmt: skip

    def prompt(length: int) -> StepMetadata:
        chunk = SequenceChunk([token % 251 for token in range(length)], 0, range(1, 2 + length // BLOCK_SIZE))
        return greedy_step([chunk], BLOCK_SIZE, [length - 1])

    found = {f"decode {count}": decode(count) for count in (1, 8, 32)}
    return found | {f"prompt {length}": prompt(length) for length in (128, 2048)}


def seconds(run: Callable[[], object]) -> float:
    """Least time of a few runs."""
    found, started = [], time.perf_counter()
    while time.perf_counter() - started < LEAST_S or len(found) < 2:
        before = time.perf_counter()
        run()
        found.append(time.perf_counter() - before)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--slices", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = preflight(
        WorkerConfig(
            arguments.model, device="cpu", dtype=arguments.dtype, quantization=arguments.quantization,
            max_model_len=2176, max_num_seqs=32, max_num_batched_tokens=2176, block_size=BLOCK_SIZE,
            num_kv_blocks=32 * 6 + 2, num_threads=arguments.threads, check_weights=False,
        )
    )  # fmt: skip
    with_slices, without = load(config, arguments.slices), load(config, 1)
    count = with_slices.model.place.slices
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps()}
    for number in range(arguments.rounds):
        for name, step in steps().items():
            pair = [seconds(lambda runner=runner, step=step: runner.execute(step))
                    for runner in ((with_slices, without) if number % 2 else (without, with_slices))]  # fmt: skip
            times[name].append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
    print(f"{arguments.dtype}, quantization {arguments.quantization}, {count} slices, {arguments.threads} threads")
    for name, pairs in times.items():
        ratios = [mine / plain for mine, plain in pairs]
        mine, plain = (min(column) for column in zip(*pairs, strict=True))
        print(f"{name:>12}  {plain * 1e3:8.2f} ms  with slices {mine * 1e3:8.2f} ms  ratio {mine / plain:.3f}  "
              f"({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
