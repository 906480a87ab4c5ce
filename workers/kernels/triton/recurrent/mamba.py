"""Mamba 2's recurrence, token by token (Dao and Gu, "Transformers are SSMs", 2024, equation 1).

One program computes some columns of one head of one sequence, with its part of the state in registers. Nothing that it
computes depends on other sequences or on the number of tokens, so a row has the same bits in every batch and for every
division of a prompt into steps. `recurrent/reference.py` does the same in torch.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.recurrent.state_slots import segment

_ELEMENTS = 2048  # elements of the state in one program: 64 registers of each thread
_WARPS = 1  # sums over a row of the state stay inside a warp


@triton.jit
def apply_mamba(
    x,  # [T, HEADS, WIDTH], tokens `x_stride` elements apart
    dt,  # float32 [T, HEADS], tokens `dt_stride` elements apart
    a,  # float32 [HEADS]
    b,  # [T, GROUPS, STATE], tokens `b_stride` elements apart
    c,  # [T, GROUPS, STATE], tokens `c_stride` elements apart
    d,  # float32 [HEADS]; unused without SKIP
    states,  # float32 [C + 1, HEADS, WIDTH, STATE]
    out,  # [T, HEADS, WIDTH]
    starts, reads, writes, save_starts, save_lens, save_slots,  # int32, of a `StateStep`
    x_stride, dt_stride, b_stride, c_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_W: tl.constexpr,  # columns of a head in a program
    BLOCK_N: tl.constexpr,  # STATE rounded up to a power of 2
    SKIP: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one head of one sequence, for all its tokens of a step.

    Sequences without tokens leave their slots as they are.
    """
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column, entry = block * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_N)
    is_column, is_entry = column < WIDTH, entry < STATE
    group = head // (HEADS // GROUPS)
    of_slot = head * (WIDTH * STATE) + column[:, None] * STATE + entry[None, :]
    inside = is_column[:, None] & is_entry[None, :]
    token, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first = token
    if token == stop:  # a padding sequence
        return
    number, last = tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)
    read, write = tl.load(reads + sequence).to(tl.int64), tl.load(writes + sequence)
    state = tl.load(states + read * (HEADS * WIDTH * STATE) + of_slot, mask=inside, other=0.0)
    rate = tl.load(a + head)
    skip = tl.load(d + head) if SKIP else 0.0
    x_row = x + token.to(tl.int64) * x_stride + head * WIDTH
    dt_at = dt + token.to(tl.int64) * dt_stride + head
    b_row = b + token.to(tl.int64) * b_stride + group * STATE
    c_row = c + token.to(tl.int64) * c_stride + group * STATE
    into = out + (token.to(tl.int64) * HEADS + head) * WIDTH
    while number <= last:
        end, slot = segment(number, last, first, stop, write, save_lens, save_slots)
        for _ in tl.range(token, end, num_stages=3):
            value = tl.load(x_row + column, mask=is_column, other=0.0).to(tl.float32)
            inputs = tl.load(b_row + entry, mask=is_entry, other=0.0).to(tl.float32)
            outputs = tl.load(c_row + entry, mask=is_entry, other=0.0).to(tl.float32)
            now = tl.load(dt_at)
            state = state * tl.exp(now * rate) + (value * now)[:, None] * inputs[None, :]
            result = tl.sum(state * outputs[None, :], 1)
            if SKIP:
                result += value * skip
            tl.store(into + column, result.to(out.dtype.element_ty), mask=is_column)
            x_row += x_stride
            dt_at += dt_stride
            b_row += b_stride
            c_row += c_stride
            into += HEADS * WIDTH
        tl.store(states + slot * (HEADS * WIDTH * STATE) + of_slot, state, mask=inside)
        token = end
        number += 1


def mamba_constants(heads: int, groups: int, width: int, state: int) -> dict[str, int]:
    """Return the constants of the kernel for heads of `width` columns and `state` entries of the state for each."""
    block_n = triton.next_power_of_2(state)
    block_w = min(triton.next_power_of_2(width), max(1, _ELEMENTS // block_n))
    return {
        "HEADS": heads, "GROUPS": groups, "WIDTH": width, "STATE": state, "BLOCK_W": block_w, "BLOCK_N": block_n,
        "num_warps": _WARPS,
    }  # fmt: skip
