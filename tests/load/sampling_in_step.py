"""Times sampling as a share of a decode step: 32 sequences of Qwen2.5-0.5B's shape, each way to sample in turn.

    python -m tests.load.sampling_in_step [--rows 32] [--threads 2] [--rounds 5] [--level avx2]

A step is what a rank computes: layers, final norm, logits and sampling. Its weights are constants, and the logits that
are sampled are drawn at random beforehand, flat or peaked as `sampling_bench.py` has them. All ways take turns in each
round; figures are medians over rounds.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks.checkpoint import SHAPES
from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import levels, library
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import describe
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.token_histories import TokenHistories
from tests.load.sampling_bench import VOCAB, cases, milliseconds
from tests.load.step_overhead import one_step


class ConstantWeights:
    """Weights that all are one number; written once, so that every page is separate memory, as in a checkpoint."""

    def has(self, name: str) -> bool:
        return False

    def shape_of(self, name: str) -> None: ...

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        into.fill_(0.01)

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--layers", type=int, default=SHAPES["0.5b"]["num_hidden_layers"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", help="a level of instruction set; the best one that this processor has if not given")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    level = next(level for level in levels.available() if args.level in (None, level.name))
    with torch.inference_mode(), library.using(level):
        if reason := library.why_not():
            raise SystemExit(f"no kernels: {reason}")
        print(f"{args.rows} sequences, {args.layers} layers, {args.threads} threads, level {level.name}")
        for name, (rest, sampling) in measure(args.rows, args.layers, args.rounds).items():
            print(f"{name:40} {sampling:7.2f} ms of {rest + sampling:7.2f} ms: {sampling / (rest + sampling):6.1%}")


def measure(rows: int, layers: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of the rest of a step, and of sampling, for each way to sample."""
    shape = SHAPES["0.5b"] | {"num_hidden_layers": layers, "vocab_size": VOCAB, "tie_word_embeddings": True}
    spec = describe({"architectures": ["Qwen2ForCausalLM"], **shape})
    decoder = Decoder(spec, TensorParallel.solo(), torch.bfloat16, torch.device("cpu"))
    decoder.load(ConstantWeights(), lambda share: None)
    step = one_step(decoder, CppBackend, rows)
    sampler = Sampler(TensorParallel.solo(), 0, VOCAB, VOCAB, histories := TokenHistories(rows, VOCAB))
    logits = torch.empty(rows, VOCAB)
    sources = {scale: torch.randn(rows, VOCAB) * scale for scale in (0.3, 4.0)}
    ways = cases(rows)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):  # the first warms up
        for name, (scale, columns) in ways.items():
            rest = step() * 1e3
            histories.write(columns)
            sampling = milliseconds(lambda columns=columns: sampler.sample(logits, columns), logits, sources[scale])
            if round_number:
                times[name].append((rest, sampling))
    return {
        name: (median(rest for rest, _ in pairs), median(sampling for _, sampling in pairs))
        for name, pairs in times.items()
    }


if __name__ == "__main__":
    main()
