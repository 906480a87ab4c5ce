"""Times the products of a mixture's experts beside a loop over them, and beside what reading their weights takes.

    python -m benchmarks.experts [--threads N] [--rounds N] [--shapes granite-1b-a400m olmoe-1b-7b] [--rows 1 8 32 128]

Each figure is of one layer's experts without the router, over more layers than caches hold, with random choices. `read`
is the rate at which the weights of the experts in use were read, as a share of streaming reads in the same round;
`loop` is how many times longer the separate products of each expert take. Both take turns in each round; figures are
medians over rounds, in brackets the lowest and highest. Times are processor time where there is one thread, so that a
busy machine matters less.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.machine import Ceilings, beyond_caches
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.quantization import int4
from oarlock.workers.quantization.expert_matmul import TorchExpertMatmul
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights
from oarlock.workers.quantization.int8 import Int8Weight, round_rows
from oarlock.workers.quantization.method import DenseWeight, LinearWeight

# hidden size, width of an expert, experts, experts of a token: Granite 3.1 1B-A400M and OLMoE 1B-7B as published.
SHAPES = {"granite-1b-a400m": (1024, 512, 32, 8), "olmoe-1b-7b": (2048, 1024, 64, 8), "quick": (64, 32, 4, 2)}
FORMS: dict[str, Callable[[Tensor], LinearWeight]] = {
    "bfloat16": DenseWeight,
    "int8": lambda weight: Int8Weight(*round_rows(weight), weight.dtype),
    "int4": int4.rounded,
}


class Layers:
    """The experts of some layers, in one form, by the kernel and by the loop over separate products."""

    def __init__(self, shape: str, form: str) -> None:
        hidden, width, self.experts, self.top_k = SHAPES[shape]
        self.sizes = ExpertsShape(0, self.experts, hidden, width, torch.bfloat16)
        gate_up, down = (
            FORMS[form](torch.randn(size).div_(32).bfloat16()) for size in ((2 * width, hidden), (hidden, width))
        )
        separate = (gate_up.gated_matmul(None, "silu"), down.matmul(float32_output=True), None)
        first = CppExpertMatmul(self.sizes, [separate] * self.experts)
        self.bytes = first.expert_bytes
        count = -(-beyond_caches() // (self.bytes * self.experts)) if shape != "quick" else 1
        self.kernels = [first, *(CppExpertMatmul(self.sizes, [separate] * self.experts) for _ in range(1, count))]
        # One set for the loop: its few products come from the same weights, which does not make it slower.
        self.loop = TorchExpertMatmul(self.sizes, [ExpertWeights(gate_up, down)] * self.experts)

    def work(self, rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Inputs, choices and their weights, of each layer."""
        x = torch.randn(rows, self.sizes.hidden).bfloat16()
        chosen = [torch.rand(rows, self.experts).topk(self.top_k).indices.sort(1).values.int() for _ in self.kernels]
        return [(x, ids, torch.rand(rows, self.top_k)) for ids in chosen]


def seconds(run: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    run()
    return clock() - begun


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(layers: Layers, rows: int, rounds: int, ceilings: Ceilings) -> list[str]:
    """Cells of a row: milliseconds of a layer, share of streaming reads, and times as long the loop takes."""
    taken: list[float] = []
    shares: list[float] = []
    ratios: list[float] = []
    for _ in range(rounds):
        work = layers.work(rows)

        def walk(work: list[tuple[Tensor, Tensor, Tensor]] = work) -> None:
            for kernel, one in zip(layers.kernels, work, strict=True):
                kernel(*one)

        rate = ceilings.read_rate()
        ours = min(seconds(walk) for _ in range(3)) / len(work)
        rate = max(rate, ceilings.read_rate()) * 1e9
        read = sum(len(ids.unique()) for _, ids, _ in work) / len(work) * layers.bytes
        taken.append(ours * 1e3)
        shares.append(read / ours / rate)
        ratios.append(min(seconds(partial(layers.loop, *work[0])) for _ in range(2)) / ours)
    return [f"{median(taken):.2f}", spread(shares), spread(ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["granite-1b-a400m", "olmoe-1b-7b"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ceilings = Ceilings(args.threads, beyond_caches() / 2**30)
    print("| shape | weights | rows | ms | read | loop |\n|---|---|---|---|---|---|")
    for shape in args.shapes:
        for form in args.forms:
            layers = Layers(shape, form)
            for rows in args.rows:
                cells = compare(layers, rows, args.rounds, ceilings)
                print(f"| {shape} | {form} | {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
