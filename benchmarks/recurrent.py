"""Times the recurrent kernels of one thread or several, by themselves.

    python -m benchmarks.recurrent [--threads N] [--rounds N] [--dtype bfloat16]

Prompts: microseconds of one thread for a token and a head (or a channel of the convolution), whose state is in a cache.
Decoding: the rate at which states are read and written, relative to copying them, with more states than a cache holds.
Each figure is the best of all rounds. With one thread, times are processor time.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.machine import beyond_caches
from oarlock.workers.recurrent import operations
from oarlock.workers.recurrent.states import StateStep

PROMPT = 512  # tokens


@dataclass(frozen=True)
class Kernel:
    """A kernel with `heads` heads (or channels), and `state`, the shape of the state of each."""

    name: str
    heads: int
    state: tuple[int, ...]
    run: Callable[[int, Tensor, StateStep, torch.dtype], Callable[[], object]]  # tokens, states, step, dtype


def delta(heads: int, key_heads: int, width: int, *, decays_channels: bool = False) -> Kernel:
    decays = (heads, width) if decays_channels else (heads,)
    name = "Kimi delta" if decays_channels else "gated delta"

    def run(tokens: int, states: Tensor, step: StateStep, dtype: torch.dtype) -> Callable[[], object]:
        q, k, v = (torch.randn(tokens, count, width).to(dtype) for count in (key_heads, key_heads, heads))
        log_decay, beta = -0.1 * torch.rand(tokens, *decays), torch.rand(tokens, heads)
        return lambda: operations.gated_delta_rule(q, k, v, log_decay, beta, states, step)

    return Kernel(f"{name}, {key_heads}/{heads} heads of {width}", heads, (width, width), run)


def mamba(heads: int, width: int, groups: int, state: int) -> Kernel:
    def run(tokens: int, states: Tensor, step: StateStep, dtype: torch.dtype) -> Callable[[], object]:
        x, b, c = (
            torch.randn(tokens, *shape).to(dtype) for shape in ((heads, width), (groups, state), (groups, state))
        )
        dt, a = torch.rand(tokens, heads), -torch.rand(heads)
        return lambda: operations.mamba2(x, dt, a, b, c, a, states, step)

    return Kernel(f"Mamba 2, {heads} heads of {width} x {state}", heads, (width, state), run)


def convolution(channels: int, taps: int) -> Kernel:
    def run(tokens: int, states: Tensor, step: StateStep, dtype: torch.dtype) -> Callable[[], object]:
        x, weight, narrow = torch.randn(tokens, channels).to(dtype), torch.randn(channels, taps), states.to(dtype)
        return lambda: operations.causal_convolution(x, narrow, weight, None, step, silu=True)

    return Kernel(f"convolution, {channels} channels, {taps} taps", channels, (taps - 1,), run)


KERNELS = [
    delta(16, 16, 128), delta(32, 16, 128), delta(32, 32, 128, decays_channels=True), mamba(64, 64, 1, 128),
    convolution(6144, 4),
]  # fmt: skip


def best_s(run: Callable[[], object], rounds: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(rounds):
        begun = clock()
        run()
        found.append(clock() - begun)
    return min(found)


def step_of(lens: list[int]) -> StateStep:
    seqs = len(lens)
    starts, none = torch.tensor([0, *lens]).cumsum(0).int(), torch.zeros(seqs + 1, dtype=torch.int32)
    reads = torch.arange(1, seqs + 1, dtype=torch.int32)
    return StateStep(starts, reads, reads + seqs, none, none[:0], none[:0])


def row(kernel: Kernel, dtype: torch.dtype, rounds: int) -> str:
    states = torch.zeros(3, kernel.heads, *kernel.state)
    prompt_s = best_s(kernel.run(PROMPT, states, step_of([PROMPT]), dtype), rounds)
    each_us = prompt_s / PROMPT / kernel.heads * 1e6 * torch.get_num_threads()
    seqs = max(1, beyond_caches() // states[0].nbytes) if states[0].nbytes > 1 << 20 else 64
    states = torch.zeros(2 * seqs + 1, kernel.heads, *kernel.state)
    decode_s = best_s(kernel.run(seqs, states, step_of([1] * seqs), dtype), rounds)
    old, new = states[1 : seqs + 1], states[seqs + 1 :]
    copy_s = best_s(lambda: new.copy_(old), rounds)
    speed = f"{2 * old.nbytes / decode_s / 1e9:.1f} | {copy_s / decode_s:.2f}"
    if len(kernel.state) == 1:  # its states are small: what counts is the time of a token
        speed = "- | -"
    return f"| {kernel.name} | {each_us:.4f} | {decode_s / seqs / kernel.heads * 1e6:.4f} | {speed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| kernel | prompt: us a token and head | decode: us a head | GB/s | of copying |\n|---|---|---|---|---|")
    for kernel in KERNELS:
        print(row(kernel, getattr(torch, args.dtype), args.rounds))


if __name__ == "__main__":
    main()
