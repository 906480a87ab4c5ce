"""RMS norm of groups of a row, times the SiLU of a gate, which is applied before or after the norm.

One program reads one group of one row once, computes in float32 and rounds once. `recurrent/reference.py` does the
same in torch.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.elementwise import warps


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
):
    """Compute the gated norm of one group of one row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside, at = column < WIDTH, group * WIDTH + column
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    factor *= tl.sigmoid(factor)
    if GATES_FIRST:
        values *= factor
    values *= tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    values *= tl.load(weight + at, mask=inside, other=0.0)
    if not GATES_FIRST:
        values *= factor
    tl.store(out + row * (GROUPS * WIDTH) + at, values.to(out.dtype.element_ty), mask=inside)


def norm_constants(groups: int, width: int) -> dict[str, int]:
    """Return the constants of the kernel, except GATES_FIRST."""
    block = triton.next_power_of_2(width)
    return {"GROUPS": groups, "WIDTH": width, "BLOCK": block, "num_warps": warps(block)}
