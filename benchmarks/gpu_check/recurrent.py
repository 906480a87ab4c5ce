"""Measures the recurrent kernels: decode steps beside the bandwidth of memory, and prompts by the token.

A decode step reads and writes the state of each sequence once, which is most of what it has to do. Prompts run token by
token, so their time is that of one token, times their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.device import measure_ceilings, seconds_of
from benchmarks.gpu_check.part import NotHere, Row, Where
from oarlock.workers.kernels.triton import availability
from oarlock.workers.recurrent.states import StateStep
from oarlock.workers.runner.cuda_graphs import Calls, CudaGraphs, GraphMaker

_IN_ALL = 1 << 30  # bytes of states of all layers, which no cache holds
_MOST_LAYERS = 512

Launch = Callable[[Tensor, StateStep], Any]  # states of a layer, step
Operation = tuple[str, tuple[int, ...], torch.dtype, Callable[[int], Launch]]  # name, shape of a slot, its dtype, maker


def recurrent(where: Where) -> Iterator[Row]:
    """Times of the operations of Qwen3.5-9B's gated delta rule, Nemotron's Mamba 2 and the convolution before them."""
    device = torch.device(where.device)
    if reason := availability.why_not(device):
        raise NotHere(reason)
    limits = measure_ceilings(where)
    prompt = 3 if where.is_tiny else 2048
    for name, shape, dtype, made in _operations(device, is_tiny=where.is_tiny):
        for sequences in (1, 2) if where.is_tiny else (1, 32, 256):
            seconds, moved = _seconds(where, shape, dtype, made(sequences), sequences, 1)
            figures = {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9}
            yield Row(
                f"{name}: {sequences} sequences", figures | {"share of bandwidth": moved / seconds / limits.bytes_s}
            )
        seconds, _ = _seconds(where, shape, dtype, made(prompt), 1, prompt)
        yield Row(f"{name}: a prompt of {prompt}", {"us": seconds * 1e6, "ns a token": seconds * 1e9 / prompt})


def _operations(device: torch.device, *, is_tiny: bool) -> list[Operation]:
    """Return the operations with their shapes. The maker of a launch takes the number of tokens."""
    from oarlock.workers.recurrent import triton_operations as operations  # Triton is only installed on some machines

    heads, key_heads, width = (2, 1, 16) if is_tiny else (32, 16, 128)
    ranges, columns, groups = (2, 16, 1) if is_tiny else (128, 64, 8)
    channels, kept = (heads + 2 * key_heads) * width, 3
    dtype = torch.float16 if is_tiny else torch.bfloat16

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def delta_rule(tokens: int) -> Launch:
        q, k = noise(2, tokens, key_heads, width).to(dtype)
        v, decay, beta = noise(tokens, heads, width).to(dtype), -noise(tokens, heads).abs(), noise(tokens, heads).abs()
        return lambda states, step: operations.gated_delta_rule(q, k, v, decay, beta, states, step)

    def kimi_rule(tokens: int) -> Launch:
        q, k, v = noise(3, tokens, heads, width).to(dtype)
        decay, beta = -noise(tokens, heads, width).abs(), noise(tokens, heads).abs()
        return lambda states, step: operations.gated_delta_rule(q, k, v, decay, beta, states, step)

    def mamba(tokens: int) -> Launch:
        x, (b, c) = noise(tokens, ranges, columns).to(dtype), noise(2, tokens, groups, width).to(dtype)
        dt, a, d = noise(tokens, ranges).abs(), -noise(ranges).abs(), noise(ranges)
        return lambda states, step: operations.mamba2(x, dt, a, b, c, d, states, step)

    def convolution(tokens: int) -> Launch:
        x, weight = noise(tokens, channels).to(dtype), noise(channels, kept + 1)
        return lambda states, step: operations.causal_convolution(x, states, weight, None, step, silu=True)

    return [
        ("gated delta rule", (heads, width, width), torch.float32, delta_rule),
        ("Kimi delta rule", (heads, width, width), torch.float32, kimi_rule),
        ("Mamba 2", (ranges, columns, width), torch.float32, mamba),
        ("convolution", (channels, kept), dtype, convolution),
    ]


def _seconds(
    where: Where, shape: tuple[int, ...], dtype: torch.dtype, launch: Launch, sequences: int, tokens: int
) -> tuple[float, int]:
    """Return the seconds of one layer for sequences of `tokens` each, and the bytes of states that it moves.

    The layers run as one graph, because the host launches more slowly than a device computes.
    """
    device = torch.device(where.device)
    slots = torch.zeros((2 * sequences + 2, *shape), dtype=dtype, device=device)
    layers = 1 if where.is_tiny else min(_MOST_LAYERS, max(1, _IN_ALL // slots.nbytes))
    states = [slots, *(torch.zeros_like(slots) for _ in range(layers - 1))]
    read = torch.arange(1, 1 + sequences, dtype=torch.int32, device=device)
    starts, none = torch.arange(sequences + 1, device=device, dtype=torch.int32), torch.zeros_like(read[:0])
    step = StateStep(starts * tokens, read, read + sequences, torch.zeros_like(starts), none, none)
    maker: GraphMaker = CudaGraphs() if where.device == "cuda" else Calls()

    def every_layer() -> None:
        for of_layer in states:
            launch(of_layer, step)

    seconds = seconds_of(where, maker.capture(every_layer).replay) / layers
    return seconds, 2 * sequences * slots[0].nbytes
