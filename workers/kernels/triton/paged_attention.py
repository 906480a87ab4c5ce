"""Causal attention over a paged KV cache for any mix of query lengths: decode, chunked prefill and prefill.

The algorithm is the online softmax of FlashAttention-2 (arXiv 2307.08691). The query heads of one KV head are rows of
one matmul. A program computes one tile over one span of its keys, as `key_spans.py` divides them.

Sizes in the shapes below: T query tokens, R rows of block tables, H query heads, D head_dim.

float32 matmuls take three passes over TensorFloat-32 parts (`tf32x3`) if the device supports them, which lose no more
than float32 itself.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.key_spans import first_visible, span_of, store_tile, tile_of, with_sink
from oarlock.workers.kernels.triton.kv_pages import row_at, scales_of, store_rows, values_in


@triton.jit(do_not_specialize=["count"])
def write_kv(
    k,  # [T, KV_HEADS, D], tokens `k_stride` elements apart
    v,
    k_pages,  # [blocks, KV_HEADS] pages
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,  # int64 [T]
    count,  # T
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    FORMAT: tl.constexpr,
):
    """Store keys and values of some tokens, for one KV head."""
    token, head = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    is_row = token < count
    inside = is_row[:, None] & (column < HEAD_DIM)[None, :]
    slot = tl.load(slot_mapping + token, mask=is_row, other=0)
    page, slot = slot // BLOCK_SIZE * KV_HEADS + head, slot % BLOCK_SIZE
    element = head * HEAD_DIM + column[None, :]
    x = tl.load(k + token[:, None] * k_stride + element, mask=inside, other=0.0)
    store_rows(k_pages, k_scales, x, page, slot, column, inside, is_row, HEAD_DIM, BLOCK_SIZE, FORMAT)
    x = tl.load(v + token[:, None] * v_stride + element, mask=inside, other=0.0)
    store_rows(v_pages, v_scales, x, page, slot, column, inside, is_row, HEAD_DIM, BLOCK_SIZE, FORMAT)


@triton.jit
def _is_seen(key, position, window, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return whether a query at `position` attends to `key`."""
    seen = key <= position
    if CHUNKED:
        seen &= key >= position - position % window
    elif WINDOW:
        seen &= key > position - window
    return seen


@triton.jit
def _capped(scores, softcap):
    """Compute `softcap * tanh(scores / softcap)` to float32 precision, also for small scores."""
    x = scores * (1.0 / softcap)
    # Below 5/8, a polynomial (tanhf of Cephes, by S. Moshier), because a sum with 1 would lose the last digits.
    large = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    square = x * x
    more = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square + 1.33314422036e-1
    more = (more * square - 3.33332819422e-1) * square * x
    return softcap * tl.where(square < 0.390625, x + more, large)


@triton.jit
def _unit(scales):
    """Return the power of 2 in the largest of `scales`, 2^-126 to 2^126, and its inverse. Both multiply exactly."""
    exponent = tl.max(scales, 0).to(tl.int32, bitcast=True) >> 23 & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_keys(
    scores, visible, values, scales, scale, softcap, largest, weights, sums,
    SOFTCAP: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add some keys: one step of the online softmax. `largest`, `weights` [BLOCK_M], `sums` [BLOCK_M, BLOCK_D].

    `scale` is positive. Without MASKED, every row sees every key. With SCALED, `values` must be multiplied by `scales`
    [BLOCK_N]. The weights are multiplied instead, in a unit that keeps them from underflowing in float16. The unit
    depends on the other keys, but no rounding does, unless values get too small for their dtype.
    """
    # Weights are powers of 2: log2(e) = 1.4427.
    factor = scale * 1.4426950408889634
    if SOFTCAP:
        scores, factor = _capped(scores * scale, softcap), 1.4426950408889634
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, 1) * factor)
    finite = highest
    if MASKED:
        finite = tl.where(highest == float("-inf"), 0.0, highest)  # avoids NaN in rows that have seen no key yet
    shrink = tl.exp2(largest - finite)
    weight = tl.exp2(scores * factor - finite[:, None])
    weights = weights * shrink + tl.sum(weight, 1)
    if SCALED:
        unit, through = _unit(scales)
        weight = weight * (scales * through)[None, :]
        more = tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)
        sums = sums * shrink[:, None] + more * unit
    else:
        sums = tl.dot(weight.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return highest, weights, sums


@triton.jit
def _keys_and_values(
    k_pages, v_pages, k_scales, v_scales, table, key, is_key, kv_head, columns, like,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] in the dtype of `like`, and their scales.

    Scales are float32 [BLOCK_N] for int8, and unused otherwise. With MASKED, elements are zero if `is_key` is not set.
    """
    if MASKED:
        page = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * KV_HEADS + kv_head
    else:
        page = tl.load(table + key // BLOCK_SIZE).to(tl.int64) * KV_HEADS + kv_head
    slot = key % BLOCK_SIZE
    row = row_at(page, slot, HEAD_DIM, BLOCK_SIZE, FORMAT)
    of_keys, of_values = k_pages + row[None, :] + columns[:, None], v_pages + row[:, None] + columns[None, :]
    if MASKED or columns.shape[0] != HEAD_DIM:
        is_part = (columns < HEAD_DIM)[:, None] & is_key[None, :]
        keys, values = tl.load(of_keys, mask=is_part, other=0), tl.load(of_values, mask=tl.trans(is_part), other=0)
    else:
        keys, values = tl.load(of_keys), tl.load(of_values)
    key_scales, value_scales = key, key
    if FORMAT == "int8":
        key_scales = scales_of(k_scales, page, slot, is_key, HEAD_DIM, BLOCK_SIZE)
        value_scales = scales_of(v_scales, page, slot, is_key, HEAD_DIM, BLOCK_SIZE)
    return (
        values_in(keys, like, FORMAT, NATIVE_FP8),
        values_in(values, like, FORMAT, NATIVE_FP8),
        key_scales,
        value_scales,
    )


@triton.jit
def _block(
    at, queries, position, first_key, stop, k_pages, v_pages, k_scales, v_scales, table, kv_head, columns,
    scale, softcap, window, largest, weights, sums,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process one block of keys from `at` on, limited to the range `first_key` to `stop`.

    Other keys may be in pages that were freed, or that hold data of another sequence.
    """
    key = at + tl.arange(0, BLOCK_N)
    is_key = (key >= first_key) & (key < stop)
    keys, values, key_scales, value_scales = _keys_and_values(
        k_pages, v_pages, k_scales, v_scales, table, key, is_key, kv_head, columns, queries,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, FORMAT, NATIVE_FP8, MASKED,
    )  # fmt: skip
    scores = tl.dot(queries, keys, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if FORMAT == "int8":
        scores *= key_scales[None, :]
    visible = is_key[None, :] & _is_seen(key[None, :], position[:, None], window, WINDOW, CHUNKED)
    return add_keys(
        scores, visible, values, value_scales, scale, softcap, largest, weights, sums, SOFTCAP, FORMAT == "int8",
        MASKED, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_programs", "window"])
def attend(
    q,  # [T, H, D], tokens `q_stride` elements apart
    k_pages,  # [blocks, KV_HEADS] pages, see `kv_pages.py`
    v_pages,
    k_scales, v_scales,
    out,  # [T, H, D]
    partial_out,  # float32 [num_programs, KV_HEADS, BLOCK_M, D]; for tiles that several programs share
    partial_stats,  # float32 [num_programs, KV_HEADS, 2, BLOCK_M]   largest score (base 2) and sum of weights
    sinks,  # float32 [H], with SINKS
    block_tables,  # int32 [R, table_stride]
    planned,  # int32 [PLANNED, num_programs], from `plan_spans`
    q_stride, table_stride, scale, softcap, window, num_programs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SINKS: tl.constexpr, FORMAT: tl.constexpr,
    FIXED: tl.constexpr,  # compute all blocks of keys with masks
    NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr,  # of float32 matmuls: depends on the device
):  # fmt: skip
    """Compute one tile for one KV head and one span of keys. Blocks of keys that all rows see need no mask."""
    plan, kv_head = planned + tl.program_id(0), tl.program_id(1)
    begin, stop = span_of(plan, num_programs)
    if begin >= stop:
        return
    token, count, first_position, table, parts = tile_of(plan, num_programs, block_tables, table_stride)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head, position = kv_head * GROUP + rows % GROUP, first_position + rows // GROUP
    query = (token + rows // GROUP).to(tl.int64)
    is_row = rows // GROUP < count
    inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    queries = tl.load(q + (query * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
    largest, weights = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # All rows see the keys from `full` to `edge`: none is after the first row, or outside the last row's window.
    first_key, full = begin * 0, begin
    if WINDOW or CHUNKED:
        first_key = first_visible(first_position, window, CHUNKED)
        last_key = first_visible(first_position + count - 1, window, CHUNKED)
        full = tl.minimum(tl.maximum(begin, tl.cdiv(last_key, BLOCK_N) * BLOCK_N), stop)
    edge = tl.maximum(full, tl.minimum(first_position + 1, stop) // BLOCK_N * BLOCK_N)
    if FIXED:
        full, edge = begin, begin
    for at in range(full, edge, BLOCK_N):
        largest, weights, sums = _block(
            at, queries, position, first_key, edge, k_pages, v_pages, k_scales, v_scales, table, kv_head, columns,
            scale, softcap, window, largest, weights, sums, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SOFTCAP, WINDOW,
            CHUNKED, FORMAT, NATIVE_FP8, PRECISION, False,
        )  # fmt: skip
    before = full - begin  # the masked blocks: first those before `full`, then those after `edge`
    for done in range(0, before + stop - edge, BLOCK_N):
        at = tl.where(done < before, begin + done, edge + done - before)
        largest, weights, sums = _block(
            at, queries, position, first_key, stop, k_pages, v_pages, k_scales, v_scales, table, kv_head, columns,
            scale, softcap, window, largest, weights, sums, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, SOFTCAP, WINDOW,
            CHUNKED, FORMAT, NATIVE_FP8, PRECISION, True,
        )  # fmt: skip
    if SINKS:  # `merge_spans` adds it once if several programs share the tile
        alone = with_sink(weights, largest, tl.load(sinks + head))
        weights = tl.where(parts > 1, weights, alone)
    store_tile(
        sums, largest, weights, inside, is_row, parts, kv_head, query * KV_HEADS * GROUP + head, partial_out,
        partial_stats, out, KV_HEADS, HEAD_DIM,
    )  # fmt: skip
