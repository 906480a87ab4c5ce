"""Pages of keys and values in the formats of `attention/kv_format.py`, which defines the values bit by bit.

A page holds the data of one block for one KV head: `BLOCK_SIZE` rows of `HEAD_DIM` elements in the model dtype or in 8
bits (`FORMAT`: "int8" or "fp8"). In int8 pages, the scales follow the rows: bfloat16 [BLOCK_SIZE], passed to kernels as
a second pointer (int16) to the same memory. This keeps rows aligned and wastes no memory.
"""

import triton
import triton.language as tl


@triton.jit
def row_at(page, slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """Return the offset of row `slot` of `page`, in elements. `page`: int64, block * KV_HEADS + head."""
    size: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 2 if FORMAT == "int8" else HEAD_DIM)
    return page * size + slot * HEAD_DIM


@triton.jit
def _scale_at(page, slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offset of the scale of row `slot`, in 16-bit elements."""
    return page * (BLOCK_SIZE * (HEAD_DIM + 2) // 2) + BLOCK_SIZE * HEAD_DIM // 2 + slot


@triton.jit
def values_in(raw, like, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Convert stored elements to the dtype of `like`, exactly. int8 elements are not multiplied by their scales.

    `NATIVE_FP8`: the device converts them, from compute capability 8.9 on.
    """
    if FORMAT == "int8":
        result = raw.to(tl.int8, bitcast=True).to(like.dtype)
    elif FORMAT == "fp8":
        if NATIVE_FP8:
            result = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(like.dtype)
        else:
            # The bits of a float16 with the same mantissa, and an exponent that is too small by 8.
            bits = raw.to(tl.int16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half).to(tl.int16)  # NaN
            result = (half.to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        result = raw
    return result


@triton.jit
def load_scales(at, mask):
    """Return the scales, bfloat16 stored as int16, at `at`: float32, zero if `mask` is not set."""
    bits = tl.load(at, mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scales_of(scales, page, slot, mask, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the scales of int8 rows: float32, zero if `mask` is not set."""
    return load_scales(scales + _scale_at(page, slot, HEAD_DIM, BLOCK_SIZE), mask)


@triton.jit
def _rounded_int8(x):
    """Round float32 `x` [R, D] to integers int32 [R, D], and return the bits of their scales, int32 [R]."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # compares magnitudes by their bits
    finite = largest < 0x7F800000
    scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, 127.0, tl.float32))
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    divisor = tl.where(finite & (bits > 0), (bits << 16).to(tl.float32, bitcast=True), 1.0)
    quotient = tl.where(finite[:, None], tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)), 0.0)
    # Adding 1.5 * 2^23 rounds to integers, ties to even. The integer is then in the lowest bits.
    values = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return values, tl.where(finite, bits, 0x7FC0)


@triton.jit
def _rounded_fp8(x):
    """Round float32 to e4m3, as int32: to nearest, ties to even, with magnitudes limited to 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.minimum(size, 0x43E00000)  # 448
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, values are multiples of 2^-9. This is the last bit of floats from 2^14 on.
    small = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    result = tl.where(kept < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size < 0x7F800000, result, 0x7F)


@triton.jit
def store_values(into, of_scales, x, inside, is_row, FORMAT: tl.constexpr):
    """Write rows `x` [R, BLOCK_D] of the model dtype, zero if `inside` is not set, to `into` [R, BLOCK_D].

    `of_scales` [R]: where the scales of int8 rows are written, as int16.
    """
    if FORMAT == "int8":
        values, bits = _rounded_int8(x.to(tl.float32))
        tl.store(into, (values & 0xFF).to(tl.uint8), mask=inside)
        tl.store(of_scales, bits.to(tl.int16), mask=is_row)
    elif FORMAT == "fp8":
        tl.store(into, _rounded_fp8(x.to(tl.float32)).to(tl.uint8), mask=inside)
    else:
        tl.store(into, x, mask=inside)


@triton.jit
def store_rows(
    pages,
    scales,  # int16, the same memory; only used by int8
    x,  # [R, BLOCK_D] in the model dtype, zero if `inside` is not set
    page,  # int64 [R]
    slot,
    column,  # [BLOCK_D]
    inside,  # [R, BLOCK_D]
    is_row,  # [R]
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write row `slot` of each page."""
    into = pages + row_at(page, slot, HEAD_DIM, BLOCK_SIZE, FORMAT)[:, None] + column[None, :]
    store_values(into, scales + _scale_at(page, slot, HEAD_DIM, BLOCK_SIZE), x, inside, is_row, FORMAT)


@triton.jit
def rotated_head(
    row,  # [D]   a query or key head of one token
    column, inside,
    cos, sin,  # float32 [ROTARY], of the token
    weight,  # float32 [D], of the head; unused without NORM
    eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, NORMS_LAST: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Return the head, normed before or after its rotation: float32, zero if `inside` is not set."""
    rotated = column < ROTARY
    if NEIGHBOURS:
        partner = tl.where(rotated, column ^ 1, column)
        angle = column // 2 + column % 2 * (ROTARY // 2)
    else:
        partner = tl.where(rotated, (column + ROTARY // 2) % ROTARY, column)
        angle = column
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM and not NORMS_LAST:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
        x = x * scale * tl.load(weight + column, mask=inside, other=0.0)
        y = y * scale * tl.load(weight + partner, mask=inside, other=0.0)
    c = tl.load(cos + angle, mask=rotated, other=1.0)
    s = tl.load(sin + angle, mask=rotated, other=0.0)
    result = x * c + y * s
    if NORM and NORMS_LAST:
        scale = 1.0 / tl.sqrt(tl.sum(result * result, 0) / HEAD_DIM + eps)
        result = result * scale * tl.load(weight + column, mask=inside, other=0.0)
    return result


@triton.jit
def rotate_and_write(
    qkv,  # [T, HEADS + 2 * KV_HEADS, D], tokens `qkv_stride` elements apart
    q,  # [T, HEADS, D]   rotated queries
    k_pages,  # [blocks, KV_HEADS] pages, see the module docstring
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,  # int64 [T]
    cos,  # float32 [T, ROTARY]
    sin,  # float32 [T, ROTARY]   the first half negated
    weight,  # float32 [HEADS + KV_HEADS, D]   scale of the head norm; unused without NORM
    query_scale,  # float32 [T]   factors of the queries; unused without SCALED
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # number of rotated elements of a head, the first ones
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    NORM: tl.constexpr,
    NORMS_LAST: tl.constexpr,  # the norm follows the rotation
    NEIGHBOURS: tl.constexpr,  # elements 2 i and 2 i + 1 are rotated, not those that are ROTARY / 2 apart
    SCALED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Normalise, rotate, scale and store one head of one token, in float32, rounded once.

    This is the work between the QKV projection and attention: head norm, rotation, and the write of keys and values.
    One pass over the projection's rows replaces three operations, so intermediate values stay in registers. T query
    tokens, H query heads, D head_dim.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    inside = column < HEAD_DIM
    row = qkv + token * qkv_stride + head * HEAD_DIM
    slot = tl.load(slot_mapping + token)
    page, slot = slot // BLOCK_SIZE * KV_HEADS, slot % BLOCK_SIZE
    one, is_row = tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1)
    if head >= HEADS + KV_HEADS:
        v = tl.load(row + column, mask=inside, other=0.0)[None, :]
        page += head - HEADS - KV_HEADS
        store_rows(
            v_pages, v_scales, v, page + one, slot, column, inside[None, :], is_row, HEAD_DIM, BLOCK_SIZE, FORMAT
        )
        return
    result = rotated_head(
        row, column, inside, cos + token * ROTARY, sin + token * ROTARY, weight + head * HEAD_DIM, eps, HEAD_DIM,
        ROTARY, NORM, NORMS_LAST, NEIGHBOURS,
    )  # fmt: skip
    if SCALED:
        result *= tl.where(head < HEADS, tl.load(query_scale + token), 1.0)
    result = result.to(q.dtype.element_ty)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * HEAD_DIM + column, result, mask=inside)
    else:
        k = tl.where(inside, result, 0.0).to(q.dtype.element_ty)[None, :]
        page += head - HEADS
        store_rows(
            k_pages, k_scales, k, page + one, slot, column, inside[None, :], is_row, HEAD_DIM, BLOCK_SIZE, FORMAT
        )
