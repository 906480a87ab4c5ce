"""Matmuls with weights of 4 or 8 bits and unrounded inputs, matmuls in a fixed order, and rounding of rows to float8.

A weight [N, K] is stored in rows of bytes. Inputs are stored in units of 16 or 32. An 8-bit unit has one byte for each
input. In a 4-bit unit, byte i has input i of the unit in its low half and input i + UNIT / 2 in its high half. Integers
are stored with the middle of their range added, so that none is negative. float8 is e4m3, without NaN. 4-bit floats are
e2m1 as in MXFP4, with powers of 2 as scales.

    weight[n, k] = (number[n, k] + zero[group of k, n]) * scale[group of k, n] * factor[n]

The matmul uses this value, rounded to the dtype of x. Without groups it uses the number itself, which every dtype holds
exactly, and the sums are multiplied by the factor. Sums are in float32 (with float32 inputs, in three passes over
TensorFloat-32 parts). Inputs are cut into spans; `merge` adds their sums in order. None of this depends on the number
of rows.

The number of rows changes from step to step, so kernels are not specialised for multiples of 16.
"""

import triton
import triton.language as tl


@triton.jit
def values_of(words, HALF: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Convert bytes to float32, exactly."""
    if FLOAT and BITS == 4:
        four = (words.to(tl.uint16) >> (4 * HALF)) & 15
        # Read as float16, the bits of e2m1 are 2 ** -14 of the number, also for subnormal numbers.
        bits = ((four & 7) << 9) | ((four & 8) << 12)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    if FLOAT:
        wide = words.to(tl.uint16)
        # Read as float16, the bits of e4m3 are 2 ** -8 of the number, also for subnormal numbers.
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    # The float32 of 2 ** 23 + n has n in its last bits. This avoids conversions of integers, which are slow.
    wide = words.to(tl.int32)
    if BITS == 4:
        wide = (wide >> (4 * HALF)) & 15
    return (wide | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (1 << (BITS - 1)))


@triton.jit
def scaled(numbers, scales, zeros, factors, spot, inside, ZEROS: tl.constexpr):
    """Scale numbers [N, units, bytes] of the groups at `spot` [N, units, 1]."""
    if ZEROS:
        numbers += tl.load(zeros + spot, mask=inside, other=0.0).to(tl.float32)
    if scales.dtype.element_ty == tl.uint8:  # exponents of powers of 2
        scale = (tl.load(scales + spot, mask=inside, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + spot, mask=inside, other=0.0).to(tl.float32)
    return numbers * (scale * factors)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,  # [T, K], rows `x_stride` elements apart
    values,  # uint8 [N, row_bytes]
    scales,  # [groups, N]; unused without groups
    zeros,  # [groups, N]; unused without ZEROS
    factors,  # float32 [N]
    partial,  # float32 [spans, T, N]
    rows,  # T
    columns,  # N
    inputs,  # K
    units,  # units of a row
    x_stride,
    row_bytes,
    span,  # units of one program: a multiple of UNITS
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT: tl.constexpr,  # inputs of a unit
    GROUP_UNITS: tl.constexpr,  # units of a group; 0: no groups
    ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of x
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,  # units of one step
    PRECISION: tl.constexpr,  # precision of float32 matmuls: depends on the device
):
    """Compute `x @ weight.T` over one span of inputs. The weight is the left operand because its tile has many rows."""
    BYTES: tl.constexpr = UNIT * BITS // 8
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_row = column < columns, row < rows
    begin = tl.program_id(2) * span
    end = tl.minimum(begin + span, units)
    factor = tl.load(factors + column, mask=is_column, other=0.0)
    stored = values + column.to(tl.int64)[:, None, None] * row_bytes + tl.arange(0, BYTES)[None, None, :]
    lane = tl.arange(0, UNITS * BYTES)
    x_rows = x + row.to(tl.int64)[None, :] * x_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(begin, end, UNITS):
        unit = at + tl.arange(0, UNITS)
        inside = is_column[:, None, None] & (unit < end)[None, :, None]
        words = tl.load(stored + (unit * BYTES)[None, :, None], mask=inside, other=0)  # [BLOCK_N, UNITS, BYTES]
        lane_unit = at + lane // BYTES
        for half in tl.static_range(8 // BITS):
            numbers = values_of(words, half, BITS, FLOAT)
            if GROUP_UNITS:
                spot = (unit // GROUP_UNITS)[None, :, None] * columns + column[:, None, None]
                numbers = scaled(numbers, scales, zeros, factor[:, None, None], spot, inside, ZEROS)
            weight = tl.reshape(numbers.to(x.dtype.element_ty), [BLOCK_N, UNITS * BYTES])
            k = lane_unit * UNIT + lane % BYTES + half * BYTES
            is_input = (lane_unit < end) & (k < inputs)
            part = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
            sums = tl.dot(weight, part, sums, input_precision=PRECISION)
    if GROUP_UNITS == 0:
        sums *= factor[:, None]
    into = partial + (tl.program_id(2) * rows + row).to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(into, sums, mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _sum(partial, bias, row, rows, column, columns, inside, spans, BIAS: tl.constexpr):
    """Sum one row's outputs over spans, and add their bias."""
    at = partial + row.to(tl.int64) * columns + column
    total = tl.load(at, mask=inside, other=0.0)
    for number in range(1, spans):
        total += tl.load(at + (number * rows).to(tl.int64) * columns, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows"])
def merge(
    partial,  # float32 [spans, T, N]
    bias,  # [N]; unused without BIAS
    residual,  # [T, N], rows `residual_stride` elements apart; unused without RESIDUAL
    out,  # [T, N], or with a gate [T, N / 2]
    rows,
    columns,
    spans,
    residual_stride,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,  # "": none; silu or gelu_tanh of the first half of outputs times the second half
    BLOCK: tl.constexpr,
):
    """Add up the spans, with bias and residual or the activation, and round once."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = columns
    if GATE != "":
        width = columns // 2
    inside = column < width
    result = _sum(partial, bias, row, rows, column, columns, inside, spans, BIAS)
    if GATE != "":
        up = _sum(partial, bias, row, rows, width + column, columns, inside, spans, BIAS)
        inner = result
        if GATE == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 * y)
            inner = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = result * tl.sigmoid(inner) * up
    if RESIDUAL:
        added = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=inside, other=0.0)
        result += added.to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "rows"])
def write_out(
    values,
    scales,
    zeros,
    factors,
    ids,  # int64 [R]: the row of the weight for each row of `out`; unused without IDS
    out,  # [R, K]
    first,  # the first row, if there are no IDS
    rows,  # R
    columns,  # N, of the whole weight
    inputs,
    units,
    row_bytes,
    IDS: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP_UNITS: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Write some rows of the weight in the dtype of `out`, rounded once. Arguments are the same as in `multiply`."""
    BYTES: tl.constexpr = UNIT * BITS // 8
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    is_row = row < rows
    column = first + row
    if IDS:
        column = tl.load(ids + row, mask=is_row, other=0)
    factor = tl.load(factors + column, mask=is_row, other=0.0)[:, None, None]
    inside = is_row[:, None, None] & (unit < units)[None, :, None]
    byte = tl.arange(0, BYTES)[None, None, :]
    at = column.to(tl.int64)[:, None, None] * row_bytes + (unit * BYTES)[None, :, None] + byte
    words = tl.load(values + at, mask=inside, other=0)
    for half in tl.static_range(8 // BITS):
        numbers = values_of(words, half, BITS, FLOAT)
        if GROUP_UNITS:
            spot = (unit // GROUP_UNITS)[None, :, None] * columns + column[:, None, None]
            numbers = scaled(numbers, scales, zeros, factor, spot, inside, ZEROS)
        else:
            numbers *= factor
        k = (unit * UNIT)[None, :, None] + byte + half * BYTES
        into = out + row.to(tl.int64)[:, None, None] * inputs + k
        tl.store(into, numbers.to(out.dtype.element_ty), mask=inside & (k < inputs))


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
    PRECISION: tl.constexpr,  # precision of float32 matmuls: depends on the device
):
    """Compute `x @ weight.T` over one span of inputs. With float32, in three passes over TensorFloat-32 parts.

    A row has the same bits for any number of rows. A library would choose kernels by the number of rows, and with them
    the order of additions. Here a program always multiplies `BLOCK_N` outputs by `BLOCK_M` rows over one span of
    inputs, in the order of inputs; `merge` adds the spans in order. Missing rows are zeros, which change no other row.
    """
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
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    into = partial + (tl.program_id(1) * rows + row).to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(into, sums, mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_heads(
    x,  # [T, heads, K], tokens `x_stride` elements apart and heads `x_head_stride`
    weight,  # [heads, N, K]
    out,  # [T, heads, N], tokens `out_stride` elements apart and heads `out_head_stride`
    rows,  # T
    columns,  # N
    inputs,  # K
    x_stride,
    x_head_stride,
    out_stride,
    out_head_stride,
    BLOCK_M: tl.constexpr,  # rows of x
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,  # precision of float32 matmuls: depends on the device
):
    """Compute `x[:, head] @ weight[head].T` for one head, rounded once.

    A row has the same bits for any number of rows, as in `multiply_in_order`. Inputs are few, so one program adds up
    all of them.
    """
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column, is_row = column < columns, row < rows
    weight_rows = weight + (head * columns + column)[:, None] * inputs
    x_rows = x + row.to(tl.int64)[None, :] * x_stride + head * x_head_stride
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, inputs, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        is_input = k < inputs
        left = tl.load(weight_rows + k[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        right = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    into = out + row.to(tl.int64)[None, :] * out_stride + head * out_head_stride + column[:, None]
    tl.store(into, sums.to(out.dtype.element_ty), mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["x_stride"])
def round_rows(
    x,  # [T, K], rows `x_stride` elements apart
    out,  # float8_e4m3fn [T, K]
    scales,  # float32 [T]
    columns,  # K
    x_stride,
    BLOCK: tl.constexpr,
):
    """Round one row. Its largest magnitude becomes 448, the largest value of float8_e4m3fn.

    A row with NaN or infinity becomes NaN.
    """
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
