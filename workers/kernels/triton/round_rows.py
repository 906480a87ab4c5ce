"""Rows of inputs as float8, each with a scale of its own, for products in float8."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["x_stride"])
def round_rows(
    x,  # [T, K], rows `x_stride` elements apart
    out,  # float8_e4m3fn [T, K]
    scales,  # float32 [T]
    columns,  # K
    x_stride,
    BLOCK: tl.constexpr,
):
    """One row: the largest number becomes 448, the largest of the type. A row with NaN or infinity becomes NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    sizes = tl.zeros([BLOCK], tl.float32)
    for at in range(0, columns, BLOCK):
        part = tl.load(x + row * x_stride + at + column, mask=at + column < columns, other=0.0).to(tl.float32)
        sizes = tl.maximum(sizes, tl.abs(part))
    size = tl.max(sizes, 0)
    tl.store(scales + row, size / 448.0)
    inverse = tl.where(size > 1e-30, 448.0 / size, 0.0)
    for at in range(0, columns, BLOCK):
        inside = at + column < columns
        part = tl.load(x + row * x_stride + at + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * columns + at + column, (part * inverse).to(out.dtype.element_ty), mask=inside)
