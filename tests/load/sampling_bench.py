"""Times sampling: torch's operations against the C++ kernels, case by case, as ratios of one run.

    python -m tests.load.sampling_bench [--rows 32] [--threads 2] [--rounds 5] [--level avx2]

Both forms sample the same logits with the same seeds in turn, so that a noisy machine is noisy for both. Flat logits
are what random weights give; peaked ones resemble a trained model's.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import levels, library
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.token_histories import TokenHistories
from tests.unit.workers.sampling_cases import Penalties, step_of

VOCAB = 151_936  # Qwen2.5's


def cases(rows: int) -> dict[str, tuple[float, StepMetadata]]:
    """Name -> the standard deviation of the logits, and the step."""
    rng = np.random.default_rng(0)

    def counts() -> dict[int, int]:
        return {int(token): 1 for token in rng.choice(VOCAB, 200, replace=False)}

    penalties = {row: Penalties(counts(), repetition=1.1, frequency=0.2, presence=0.1) for row in range(rows)}
    return {
        "greedy": (0.3, step_of(rows, temperature=0.0)),
        "temperature 1, flat": (0.3, step_of(rows)),
        "temperature 1, peaked": (4.0, step_of(rows)),
        "top-p 0.9, flat": (0.3, step_of(rows, top_p=0.9)),
        "top-p 0.9, peaked": (4.0, step_of(rows, top_p=0.9)),
        "min-p 0.05, flat": (0.3, step_of(rows, min_p=0.05)),
        "min-p 0.2, top-p 0.9, flat": (0.3, step_of(rows, min_p=0.2, top_p=0.9)),
        "top-k 50": (0.3, step_of(rows, top_k=50)),
        "top-k 50, top-p 0.9": (0.3, step_of(rows, top_k=50, top_p=0.9)),
        "top-k 1000": (0.3, step_of(rows, top_k=1000)),
        "penalties of 200 ids, greedy": (0.3, step_of(rows, temperature=0.0, penalties=penalties)),
        "logprobs 5, greedy": (0.3, step_of(rows, temperature=0.0, num_logprobs=5)),
        "all: top-p 0.9, penalties, logprobs 5": (0.3, step_of(rows, top_p=0.9, penalties=penalties, num_logprobs=5)),
    }


def milliseconds(sample: Callable[[], object], logits: Tensor, source: Tensor) -> float:
    logits.copy_(source)  # sampling may overwrite them
    start = time.perf_counter()
    sample()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", help="a level of instruction set; the best one that this processor has if not given")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    level = next(level for level in levels.available() if args.level in (None, level.name))
    print(
        f"{args.rows} rows of {VOCAB} logits, {args.threads} threads, level {level.name}; best of {args.rounds} rounds"
    )
    with torch.inference_mode(), library.using(level):
        if reason := library.why_not():
            raise SystemExit(f"no kernels: {reason}")
        for name, (scale, step) in cases(args.rows).items():
            if args.only in name:
                compare(name, torch.randn(args.rows, VOCAB) * scale, step, args.rounds)


def compare(name: str, source: Tensor, step: StepMetadata, rounds: int) -> None:
    logits = torch.empty_like(source)
    histories = TokenHistories(step.num_seqs, VOCAB)
    histories.write(step)
    samplers = {form: Sampler(TensorParallel.solo(), 0, VOCAB, VOCAB, histories) for form in ("torch", "kernels")}
    times: dict[str, list[float]] = {form: [] for form in samplers}
    tokens = {}
    for round_number in range(rounds + 1):  # the first warms up
        for form, sampler in samplers.items():

            def sample(sampler: Sampler = sampler, form: str = form) -> None:
                tokens[form] = sampler.sample(logits, step)[0].numpy()

            hidden = mock.patch.object(library, "provides", lambda *_: False)
            with hidden if form == "torch" else nullcontext():
                taken = milliseconds(sample, logits, source)
            if round_number:
                times[form].append(taken)
    assert (tokens["torch"] == tokens["kernels"]).all(), "both forms choose the same tokens"
    ratios = sorted(ours / theirs for ours, theirs in zip(times["kernels"], times["torch"], strict=True))
    print(
        f"{name:40} torch {min(times['torch']):7.2f} ms   kernels {min(times['kernels']):7.2f} ms   "
        f"ratio {ratios[len(ratios) // 2]:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
