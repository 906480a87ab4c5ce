"""The two small matmuls of LoRA adapters: rows of a step with different adapters, or none, in one launch each.

The rows come in blocks of one slot (`attention/blocks_by_slot.py`). `shrink_rows` computes `A x`, `expand_rows` adds
`scale * B (A x)` to the sums of the layer's own matmul and finishes them: gate, residual, and one rounding. Which rows
have which adapter, and which slots adapt the layer, is read on the device, and grids depend only on the numbers of rows
and slots, so launches can be captured in a CUDA graph.

A row has the same bits in every batch. Tiles and spans of inputs do not depend on the rows, spans are added in order,
and missing rows are zeros, which change no other row. Rows without an adapter keep the bits of the layer's own sums.
"""

import triton
import triton.language as tl


@triton.jit
def _block(order, slots, ranks, first, rows, BLOCK_M: tl.constexpr):
    """Return the rows of a program's block, which of them exist, their slot, and its rank: 0 if nothing is added."""
    slot = tl.load(slots + tl.program_id(0))
    row = tl.load(order + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)) - first
    rank = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
    return row, (row >= 0) & (row < rows), slot, rank


@triton.jit(do_not_specialize=["first", "rows"])
def shrink_rows(
    x,  # [T, K], rows `x_stride` elements apart
    a,  # [slots, W, K]   W: parts of the layer times MAX_RANK
    order,  # int32 [blocks * BLOCK_M]
    slots,  # int32 [blocks]
    ranks,  # int32 [slots]
    low,  # float32 [spans, T, W]: zeros if nothing is added to a row
    first,  # row of the step that is row 0 of `x`
    rows,  # T
    width,  # W
    inputs,  # K
    x_stride,
    span,  # inputs of one program: a multiple of BLOCK_K
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,  # precision of float32 matmuls: depends on the device
):
    """Compute `A x` of one block of rows over one span of inputs. A is the left operand."""
    row, is_row, slot, rank = _block(order, slots, ranks, first, rows, BLOCK_M)
    if slot >= 0:
        column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        is_column = column < width
        is_read = is_column & (column % MAX_RANK < rank)
        begin = tl.program_id(2) * span
        end = tl.minimum(begin + span, inputs)
        end = tl.where(rank > 0, end, begin)
        a_rows = a + ((slot - 1).to(tl.int64) * width + column.to(tl.int64))[:, None] * inputs
        x_rows = x + row.to(tl.int64)[None, :] * x_stride
        sums = tl.zeros([BLOCK_W, BLOCK_M], tl.float32)
        for at in range(begin, end, BLOCK_K):
            k = at + tl.arange(0, BLOCK_K)
            is_input = k < end
            left = tl.load(a_rows + k[None, :], mask=is_read[:, None] & is_input[None, :], other=0.0)
            right = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
            sums = tl.dot(left, right, sums, input_precision=PRECISION)
        into = low + (tl.program_id(2) * rows + row).to(tl.int64)[None, :] * width + column[:, None]
        tl.store(into, sums, mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["rows", "start", "local"])
def take_columns(
    ids,  # int64 [T]
    a,  # [slots, MAX_RANK, local]
    order,
    slots,
    ranks,
    low,  # [T, MAX_RANK]: zeros for ids of other ranks
    rows,  # T
    start,  # first id of this rank
    local,  # ids of this rank
    MAX_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Read A's column of each id: `A x` of an embedding."""
    row, is_row, slot, rank = _block(order, slots, ranks, 0, rows, BLOCK_M)
    number = tl.load(ids + row, mask=is_row, other=0) - start
    is_own = is_row & (number >= 0) & (number < local)
    j = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    at = a + ((slot - 1).to(tl.int64) * MAX_RANK + j)[None, :] * local + number[:, None]
    found = tl.load(at, mask=is_own[:, None] & (j < rank)[None, :], other=0.0)
    into = low + row.to(tl.int64)[:, None] * MAX_RANK + j[None, :]
    tl.store(into, found.to(low.dtype.element_ty), mask=is_row[:, None] & (j < MAX_RANK)[None, :])


@triton.jit
def _updated(
    sums, low, b, row, is_row, column, end, outputs, at, low_span, spans, rank, scale, slot,
    MAX_RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums at `column` of a part whose values begin at `at` of a row of `low`, plus the update."""
    is_column = column < end
    inside = is_row[:, None] & is_column[None, :]
    result = tl.load(sums + row.to(tl.int64)[:, None] * outputs + column[None, :], mask=inside, other=0.0)
    result = result.to(tl.float32)
    b_rows = b + (slot - 1).to(tl.int64) * MAX_RANK * outputs + column[None, :]
    for start in range(0, rank, BLOCK_R):
        j = start + tl.arange(0, BLOCK_R)
        is_value = is_row[:, None] & (j < rank)[None, :]
        values = low + at[:, None] + j[None, :]
        left = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
        for number in range(1, spans):
            left += tl.load(values + number * low_span, mask=is_value, other=0.0).to(tl.float32)
        right = tl.load(b_rows + j[:, None] * outputs, mask=(j < rank)[:, None] & is_column[None, :], other=0.0)
        result = tl.dot(left * scale, right.to(tl.float32), result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["first", "rows"], do_not_specialize_on_alignment=["low"])
def expand_rows(
    sums,  # [T, N]   sums of the layer's matmul and its bias, float32 or rounded
    low,  # [spans, T, W]
    b,  # [slots, MAX_RANK, N]
    scales,  # float32 [slots, parts]
    order,
    slots,
    ranks,
    tiles,  # int32 [tiles, 3]   part, first output, and end of the part
    residual,  # [T, N], rows `residual_stride` elements apart; unused without RESIDUAL
    out,  # [T, N], or with a gate [T, N / 2]; `sums` with IN_PLACE
    first,
    rows,  # T
    outputs,  # N
    width,  # W
    spans,
    parts,
    residual_stride,
    MAX_RANK: tl.constexpr,
    GATE: tl.constexpr,  # "": none; silu or gelu_tanh of the first half of outputs times the second half
    RESIDUAL: tl.constexpr,
    IN_PLACE: tl.constexpr,  # only rows with an adapter change
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the update to one tile of sums, and finish them as `merge` does in `matmul.py`."""
    row, is_row, slot, rank = _block(order, slots, ranks, first, rows, BLOCK_M)
    is_needed = slot >= 0
    if IN_PLACE:
        is_needed = rank > 0
    if is_needed:
        tile = tiles + tl.program_id(1) * 3
        part, end = tl.load(tile), tl.load(tile + 2)
        column = tl.load(tile + 1) + tl.arange(0, BLOCK_N)
        low_row, low_span = row.to(tl.int64) * width, rows.to(tl.int64) * width
        own = scales + (slot - 1) * parts
        scale = tl.load(own + part, mask=rank > 0, other=0.0)
        result = _updated(
            sums, low, b, row, is_row, column, end, outputs, low_row + part * MAX_RANK, low_span, spans, rank, scale,
            slot, MAX_RANK, BLOCK_M, BLOCK_R, PRECISION,
        )  # fmt: skip
        out_width = outputs
        if GATE != "":
            out_width = outputs // 2
            scale = tl.load(own + 1, mask=rank > 0, other=0.0)
            up = _updated(
                sums, low, b, row, is_row, out_width + column, out_width + end, outputs, low_row + MAX_RANK, low_span,
                spans, rank, scale, slot, MAX_RANK, BLOCK_M, BLOCK_R, PRECISION,
            )  # fmt: skip
            inner = result
            if GATE == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 * y)
                inner = 1.5957691216057308 * (result + 0.044715 * result * result * result)
            result = result * tl.sigmoid(inner) * up
        inside = is_row[:, None] & (column < end)[None, :]
        if RESIDUAL:
            at = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
            result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        into = out + row.to(tl.int64)[:, None] * out_width + column[None, :]
        tl.store(into, result.to(out.dtype.element_ty), mask=inside)
