"""RMS norm of groups of a row, times the SiLU of a gate, which is applied before or after the norm, or its sigmoid.

One program reads one group, or one head, of one row once, computes in float32 and rounds once. If a norm spans several
heads, which may be on several ranks, the sums of squares of all its heads come first. `recurrent/reference.py` does the
same in torch.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.elementwise import warps


@triton.jit
def _gated_row(x, gate, inside, GATES_FIRST: tl.constexpr):
    """Return the values to norm, which are gated with GATES_FIRST, and the SiLU of their gate: float32 twice."""
    values = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    factor *= tl.sigmoid(factor)
    if GATES_FIRST:
        values *= factor
    return values, factor


@triton.jit
def _store_normed(values, factor, mean, eps, weight, out, inside, GATES_FIRST: tl.constexpr):
    """Norm the results of `_gated_row` by the `mean` of the squares, gate them without GATES_FIRST, and store them."""
    values *= tl.rsqrt(mean + eps)
    values *= tl.load(weight, mask=inside, other=0.0)
    if not GATES_FIRST:
        values *= factor
    tl.store(out, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_group(
    x,  # [T, GROUPS, WIDTH], tokens `x_stride` elements apart
    gate,  # [T, GROUPS, WIDTH], tokens `gate_stride` elements apart
    weight,  # float32 [GROUPS, WIDTH]
    out,  # [T, GROUPS, WIDTH]
    eps,
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of 2
    GATES_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,  # multiplies by the sigmoid of the gate, after the norm
):
    """Compute the gated norm of one group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside, at = column < WIDTH, group * WIDTH + column
    values, factor = _gated_row(x + row * x_stride + at, gate + row * gate_stride + at, inside, GATES_FIRST)
    if SIGMOID:
        factor = tl.sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    mean = tl.sum(values * values, 0) / WIDTH
    _store_normed(values, factor, mean, eps, weight + at, out + row * (GROUPS * WIDTH) + at, inside, GATES_FIRST)


@triton.jit
def sum_squares(
    x,  # [T, HEADS, WIDTH], tokens `x_stride` elements apart
    gate,  # [T, HEADS, WIDTH], tokens `gate_stride` elements apart
    squares,  # float32 [T, HEADS]
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,  # HEADS: a head is a group here
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of 2
    GATES_FIRST: tl.constexpr,
):
    """Compute one head's part of a norm over several heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    at = head * WIDTH + column
    inside = column < WIDTH
    values, _ = _gated_row(x + row * x_stride + at, gate + row * gate_stride + at, inside, GATES_FIRST)
    tl.store(squares + row * GROUPS + head, tl.sum(values * values, 0))


@triton.jit
def norm_head(
    x,  # [T, HEADS, WIDTH], tokens `x_stride` elements apart
    gate,  # [T, HEADS, WIDTH], tokens `gate_stride` elements apart
    squares,  # float32 [T, groups, MEMBERS]: of all heads of a norm, also of other ranks
    weight,  # float32 [HEADS, WIDTH]
    out,  # [T, HEADS, WIDTH]
    eps,
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,  # HEADS: a head is a group here
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of 2
    GATES_FIRST: tl.constexpr,
    NORMS: tl.constexpr,  # norms of a row
    MEMBERS: tl.constexpr,  # heads of a norm, on all ranks
    BLOCK_M: tl.constexpr,  # MEMBERS rounded up to a power of 2
):
    """Compute one head of a norm over several heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, member = tl.arange(0, BLOCK), tl.arange(0, BLOCK_M)
    at = head * WIDTH + column
    inside = column < WIDTH
    values, factor = _gated_row(x + row * x_stride + at, gate + row * gate_stride + at, inside, GATES_FIRST)
    parts = squares + (row * NORMS + head // (GROUPS // NORMS)) * MEMBERS + member
    mean = tl.sum(tl.load(parts, mask=member < MEMBERS, other=0.0), 0) / (MEMBERS * WIDTH)
    _store_normed(values, factor, mean, eps, weight + at, out + row * (GROUPS * WIDTH) + at, inside, GATES_FIRST)


def norm_constants(groups: int, width: int) -> dict[str, int]:
    """Return the constants that all kernels have, except GATES_FIRST."""
    block = triton.next_power_of_2(width)
    return {"GROUPS": groups, "WIDTH": width, "BLOCK": block, "num_warps": warps(block)}
