"""Products whose rows have the same bits however many there are: one tile and one cut of the inputs for each weight.

A library chooses kernels by the number of rows, and with them the order of additions. Here a program always multiplies
`BLOCK_N` outputs by `BLOCK_M` rows over one span of inputs, step by step in their order; spans are added up in their
order by `merge` of `weight_only.py`. Rows that are not there are zeros, which change no other row.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_in_order(
    x,  # [T, K], rows `x_stride` elements apart
    weight,  # [N, K]
    partial,  # float32 [spans, T, N]
    rows,  # T
    columns,  # N
    inputs,  # K
    x_stride,
    span,  # inputs of one program: a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,  # rows of x
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`x @ weight.T` over one span of inputs. Products of float32 take three passes over TensorFloat-32 parts."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_row = column < columns, row < rows
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, inputs)
    weight_rows = weight + column.to(tl.int64)[:, None] * inputs
    x_rows = x + row.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(begin, end, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        is_input = k < end
        left = tl.load(weight_rows + k[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        right = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="tf32x3")
    into = partial + (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(into, sums, mask=is_column[:, None] & is_row[None, :])
