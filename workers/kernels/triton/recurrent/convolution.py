"""Depthwise convolution over a token and the tokens before it, some of which are in a slot of the sequence.

One program computes some channels of one token, and finds the token's sequence on the device. A row depends on nothing
but its own inputs, so it has the same bits in every batch and for every division of a prompt into steps.
`recurrent/reference.py` does the same in torch.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.recurrent.state_slots import segment

_BLOCK = 256  # channels of a program, one for each thread
_WARPS = 8


@triton.jit
def _sequence_of(token, starts, sequences):
    """Return the sequence that has `token`: the last one that starts at or before it. All tokens belong to one."""
    low, high = tl.zeros([], tl.int32), tl.zeros([], tl.int32) + sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) <= token
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low


@triton.jit
def _input(
    newest,  # x of the token
    old,  # the inputs before the sequence's first token of the step, oldest first
    before: tl.constexpr,  # number of tokens between the input and the token
    count,  # tokens of the sequence in this step, up to the token
    channel,
    inside,
    x_stride,
    KEPT: tl.constexpr,
):
    """Return one input of a token: [BLOCK] in the dtype of x."""
    in_step = count > before
    value = tl.load(newest - before * x_stride + channel, mask=inside & in_step, other=0.0)
    at = channel * KEPT + (KEPT - 1 + count - before)
    kept = tl.load(old + at, mask=inside & (count <= before), other=0.0)
    return tl.where(in_step, value, kept)


@triton.jit
def _keep(states, slot, newest, old, count, channel, inside, x_stride, CHANNELS: tl.constexpr, KEPT: tl.constexpr):
    """Write the latest KEPT inputs to a slot."""
    into = states + slot * (CHANNELS * KEPT) + channel * KEPT
    for place in tl.static_range(KEPT):
        value = _input(newest, old, KEPT - 1 - place, count, channel, inside, x_stride, KEPT)
        tl.store(into + place, value, mask=inside)


@triton.jit(do_not_specialize=["sequences"])
def convolve(
    x,  # [T, CHANNELS], tokens `x_stride` elements apart
    states,  # [C + 1, CHANNELS, KEPT]
    weight,  # float32 [CHANNELS, KEPT + 1]
    bias,  # float32 [CHANNELS]; unused without BIAS
    out,  # [T, CHANNELS]
    starts, reads, writes, save_starts, save_lens, save_slots,  # int32, of a `StateStep`
    sequences,  # S
    x_stride,
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,  # taps except the token's own
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Compute some channels of one token, and write the states after it."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    sequence = _sequence_of(token, starts, sequences)
    first, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    count, last = token + 1 - first, tl.load(save_starts + sequence + 1)
    newest = x + token.to(tl.int64) * x_stride
    old = states + tl.load(reads + sequence).to(tl.int64) * (CHANNELS * KEPT)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(KEPT + 1):
        value = _input(newest, old, KEPT - tap, count, channel, inside, x_stride, KEPT).to(tl.float32)
        total += value * tl.load(weight + channel * (KEPT + 1) + tap, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)
    for number in range(tl.load(save_starts + sequence), last + 1):
        end, slot = segment(number, last, first, stop, tl.load(writes + sequence), save_lens, save_slots)
        if end == token + 1:
            _keep(states, slot, newest, old, count, channel, inside, x_stride, CHANNELS, KEPT)


def convolution_constants(channels: int, taps: int) -> dict[str, int]:
    """Return the constants of the kernel, except BIAS and SILU."""
    block = min(_BLOCK, triton.next_power_of_2(channels))
    return {"CHANNELS": channels, "KEPT": taps - 1, "BLOCK": block, "num_warps": _WARPS}
