"""Pages of keys and values in the forms of `attention/kv_format.py`, which defines the numbers bit by bit.

A page is what one block holds for one KV head: `BLOCK_SIZE` rows of `HEAD_DIM` numbers in the model's type, or of 8
bits (`FORM`: "int8" or "fp8"). Behind the rows of int8 lie their scales, bfloat16 [BLOCK_SIZE], which kernels get as a
second pointer to the same memory, of int16. Rows stay aligned so, and a page takes no more than its rows.
"""

import triton
import triton.language as tl


@triton.jit
def row_at(page, slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORM: tl.constexpr):
    """Offset of row `slot` of `page`, in elements. `page`: int64, block * KV_HEADS + head."""
    size: tl.constexpr = BLOCK_SIZE * (HEAD_DIM + 2 if FORM == "int8" else HEAD_DIM)
    return page * size + slot * HEAD_DIM


@triton.jit
def _scale_at(page, slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Offset of the scale of row `slot`, in elements of 16 bits."""
    return page * (BLOCK_SIZE * (HEAD_DIM + 2) // 2) + BLOCK_SIZE * HEAD_DIM // 2 + slot


@triton.jit
def numbers(raw, like, FORM: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """Stored elements as numbers of the type of `like`, exactly; those of int8 without their scales.

    `NATIVE_FP8`: the device converts them, from compute capability 8.9 on.
    """
    if FORM == "int8":
        result = raw.to(tl.int8, bitcast=True).to(like.dtype)
    elif FORM == "fp8":
        if NATIVE_FP8:
            result = raw.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(like.dtype)
        else:
            # The bits of a float16 with the same mantissa, and an exponent that is too small by 8.
            bits = raw.to(tl.int16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half).to(tl.int16)  # not a number
            result = (half.to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        result = raw
    return result


@triton.jit
def scales_of(scales, page, slot, mask, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The scales of rows of int8: float32, zero where `mask` is not set."""
    bits = tl.load(scales + _scale_at(page, slot, HEAD_DIM, BLOCK_SIZE), mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded_int8(x):
    """float32 `x` [R, D] -> whole numbers int32 [R, D], and the bits of their scales, int32 [R]."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # bits of floats from 0 on
    finite = largest < 0x7F800000
    scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, 127.0, tl.float32))
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    divisor = tl.where(finite & (bits > 0), (bits << 16).to(tl.float32, bitcast=True), 1.0)
    quotient = tl.where(finite[:, None], tl.math.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)), 0.0)
    # Adding 1.5 * 2^23 rounds to whole numbers, ties to even: the lowest bits are the number.
    values = (quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return values, tl.where(finite, bits, 0x7FC0)


@triton.jit
def _rounded_fp8(x):
    """float32 -> e4m3, as int32: rounded to the nearest, ties to even, at most 448 in size."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.minimum(size, 0x43E00000)  # 448
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9: the last bit of floats from 2^14 on.
    small = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    result = tl.where(kept < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(size < 0x7F800000, result, 0x7F)


@triton.jit
def store_rows(
    pages,
    scales,  # int16, the same memory; used by int8 alone
    x,  # [R, BLOCK_D] in the model's type, zero where `inside` is not set
    page,  # int64 [R]
    slot,
    column,  # [BLOCK_D]
    inside,  # [R, BLOCK_D]
    is_row,  # [R]
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Writes row `slot` of each page."""
    into = pages + row_at(page, slot, HEAD_DIM, BLOCK_SIZE, FORM)[:, None] + column[None, :]
    if FORM == "int8":
        values, bits = _rounded_int8(x.to(tl.float32))
        tl.store(into, (values & 0xFF).to(tl.uint8), mask=inside)
        tl.store(scales + _scale_at(page, slot, HEAD_DIM, BLOCK_SIZE), bits.to(tl.int16), mask=is_row)
    elif FORM == "fp8":
        tl.store(into, _rounded_fp8(x.to(tl.float32)).to(tl.uint8), mask=inside)
    else:
        tl.store(into, x, mask=inside)
