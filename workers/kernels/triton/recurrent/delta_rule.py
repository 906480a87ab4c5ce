"""The gated delta rule, token by token (Yang et al., "Gated Delta Networks", 2024, equation 10), also with a decay for
each channel of a key (Kimi Team, "Kimi Linear", 2025, equation 1).

One program computes some value columns of one head of one sequence, with its part of the state in registers. Nothing
that it computes depends on other sequences or on the number of tokens, so a row has the same bits in every batch and
for every division of a prompt into steps. `recurrent/reference.py` does the same in torch.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.recurrent.state_slots import segment

_ELEMENTS = 2048  # elements of the state in one program: 64 registers of each thread
_WARPS = 1  # sums over a key stay inside a warp


@triton.jit
def _unit_row(row, column, inside, eps):
    """Return a row divided by its length: float32 [BLOCK_K]."""
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit
def apply_delta_rule(
    q,  # [T, KEY_HEADS, KEY], tokens `q_stride` elements apart
    k,  # [T, KEY_HEADS, KEY], tokens `k_stride` elements apart
    v,  # [T, HEADS, VALUE], tokens `v_stride` elements apart
    log_decay,  # float32 [T, HEADS], or [T, HEADS, KEY] with CHANNELS, tokens `decay_stride` elements apart
    beta,  # float32 [T, HEADS], tokens `beta_stride` elements apart
    states,  # float32 [C + 1, HEADS, KEY, VALUE]
    out,  # [T, HEADS, VALUE]
    starts, reads, writes, save_starts, save_lens, save_slots,  # int32, of a `StateStep`
    q_stride, k_stride, v_stride, decay_stride, beta_stride,
    eps,
    scale,  # of queries
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr,  # KEY rounded up to a power of 2
    BLOCK_V: tl.constexpr,  # value columns of a program
    CHANNELS: tl.constexpr,  # each channel of a key has a decay
):  # fmt: skip
    """Compute some value columns of one head of one sequence, for all its tokens of a step.

    Sequences without tokens leave their slots as they are.
    """
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_column, value_column = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key_column < KEY, value_column < VALUE
    key_head = head // (HEADS // KEY_HEADS)
    of_slot = head * (KEY * VALUE) + key_column[:, None] * VALUE + value_column[None, :]
    inside = is_key[:, None] & is_value[None, :]
    token, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    first = token
    if token == stop:  # a padding sequence
        return
    number, last = tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)
    read, write = tl.load(reads + sequence).to(tl.int64), tl.load(writes + sequence)
    state = tl.load(states + read * (HEADS * KEY * VALUE) + of_slot, mask=inside, other=0.0)
    q_row = q + token.to(tl.int64) * q_stride + key_head * KEY
    k_row = k + token.to(tl.int64) * k_stride + key_head * KEY
    v_row = v + token.to(tl.int64) * v_stride + head * VALUE
    decay_at = log_decay + token.to(tl.int64) * decay_stride + head * (KEY if CHANNELS else 1)
    beta_at = beta + token.to(tl.int64) * beta_stride + head
    into = out + (token.to(tl.int64) * HEADS + head) * VALUE
    while number <= last:
        end, slot = segment(number, last, first, stop, write, save_lens, save_slots)
        for _ in tl.range(token, end, num_stages=3):
            query = _unit_row(q_row, key_column, is_key, eps) * scale
            key = _unit_row(k_row, key_column, is_key, eps)
            value = tl.load(v_row + value_column, mask=is_value, other=0.0).to(tl.float32)
            if CHANNELS:
                state *= tl.exp(tl.load(decay_at + key_column, mask=is_key, other=0.0))[:, None]
            else:
                state *= tl.exp(tl.load(decay_at))
            delta = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta_at)
            state += key[:, None] * delta[None, :]
            result = tl.sum(state * query[:, None], 0)
            tl.store(into + value_column, result.to(out.dtype.element_ty), mask=is_value)
            q_row += q_stride
            k_row += k_stride
            v_row += v_stride
            decay_at += decay_stride
            beta_at += beta_stride
            into += HEADS * VALUE
        tl.store(states + slot * (HEADS * KEY * VALUE) + of_slot, state, mask=inside)
        token = end
        number += 1


def delta_constants(
    heads: int, key_heads: int, key: int, value: int, *, decays_channels: bool = False
) -> dict[str, int]:
    """Return the constants of the kernel for heads of the widths `key` and `value`."""
    block_k = triton.next_power_of_2(key)
    block_v = min(triton.next_power_of_2(value), max(1, _ELEMENTS // block_k))
    return {
        "HEADS": heads, "KEY_HEADS": key_heads, "KEY": key, "VALUE": value, "BLOCK_K": block_k, "BLOCK_V": block_v,
        "CHANNELS": decays_channels, "num_warps": _WARPS,
    }  # fmt: skip
