"""Between the projection of query, key and value and attention: head norm, rotation, and the write of keys and values.

One pass over the projection's rows in place of three operations: what they would write and read again stays in
registers. Sizes in the shapes below: T query tokens, H query heads, D head_dim.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.kv_pages import store_rows


@triton.jit
def rotate_and_write(
    qkv,  # [T, HEADS + 2 * KV_HEADS, D], tokens `qkv_stride` elements apart
    q,  # [T, HEADS, D]   rotated queries
    k_pages,  # [blocks, KV_HEADS] pages, as `kv_pages.py` describes them
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,  # int64 [T]
    cos,  # float32 [T, ROTARY]
    sin,  # float32 [T, ROTARY]   the first half negated
    weight,  # float32 [HEADS + KV_HEADS, D]   scale of the head norm; anything without NORM
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # elements of a head that are rotated, the first ones
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of 2 from HEAD_DIM on
    NORM: tl.constexpr,
    FORM: tl.constexpr,
):
    """One head of one token, in float32, rounded once."""
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
        store_rows(v_pages, v_scales, v, page + one, slot, column, inside[None, :], is_row, HEAD_DIM, BLOCK_SIZE, FORM)
        return
    rotated = column < ROTARY
    partner = tl.where(rotated, (column + ROTARY // 2) % ROTARY, column)
    x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
        x = x * scale * tl.load(weight + head * HEAD_DIM + column, mask=inside, other=0.0)
        y = y * scale * tl.load(weight + head * HEAD_DIM + partner, mask=inside, other=0.0)
    c = tl.load(cos + token * ROTARY + column, mask=rotated, other=1.0)
    s = tl.load(sin + token * ROTARY + column, mask=rotated, other=0.0)
    result = x * c + y * s
    result = result.to(q.dtype.element_ty)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * HEAD_DIM + column, result, mask=inside)
    else:
        k = tl.where(inside, result, 0.0).to(q.dtype.element_ty)[None, :]
        page += head - HEADS
        store_rows(k_pages, k_scales, k, page + one, slot, column, inside[None, :], is_row, HEAD_DIM, BLOCK_SIZE, FORM)
