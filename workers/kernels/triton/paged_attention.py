"""Causal attention over pages of keys and values, at any mix of query lengths: decode, chunks and prefill alike.

The online softmax of FlashAttention-2 (arXiv 2307.08691), with the query heads of one KV head as rows of one product,
and keys split over programs whose results are merged afterwards, as in Flash-Decoding. A program computes one tile:
some query tokens of one sequence, for one KV head and one span of its keys.

Sizes in the shapes below: T query tokens, S sequences, H query heads, D head_dim; a tile has `BLOCK_M` rows, of which
row r is query token r // GROUP of the tile, and query head r % GROUP of the KV head's.

Products of float32 take three passes over TensorFloat-32 parts (`tf32x3`), which loses no more than float32 itself.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.kv_pages import numbers, row_at, scales_of, store_rows


@triton.jit
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
    BLOCK_D: tl.constexpr,  # the power of 2 from HEAD_DIM on
    FORM: tl.constexpr,
):
    """Stores keys and values of some tokens, for one KV head."""
    token, head = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    column = tl.arange(0, BLOCK_D)
    is_row = token < count
    inside = is_row[:, None] & (column < HEAD_DIM)[None, :]
    slot = tl.load(slot_mapping + token, mask=is_row, other=0)
    page, slot = slot // BLOCK_SIZE * KV_HEADS + head, slot % BLOCK_SIZE
    place = head * HEAD_DIM + column[None, :]
    x = tl.load(k + token[:, None] * k_stride + place, mask=inside, other=0.0)
    store_rows(k_pages, k_scales, x, page, slot, column, inside, is_row, HEAD_DIM, BLOCK_SIZE, FORM)
    x = tl.load(v + token[:, None] * v_stride + place, mask=inside, other=0.0)
    store_rows(v_pages, v_scales, x, page, slot, column, inside, is_row, HEAD_DIM, BLOCK_SIZE, FORM)


@triton.jit
def _tile(tile, tile_seqs, tile_rows, query_start_loc, seq_lens, QUERIES: tl.constexpr):
    """A tile's sequence, its first token in the batch, the number of its tokens, and the first one's position."""
    seq = tl.load(tile_seqs + tile)
    row = tl.load(tile_rows + tile)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    position = tl.load(seq_lens + seq) - length + row
    return seq, start + row, tl.minimum(length - row, QUERIES), position


@triton.jit
def _first_key(position, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that the query at `position` sees, and the start of the block of keys that holds it."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first, first // BLOCK_N * BLOCK_N


@triton.jit
def _is_seen(key, position, window, WINDOW: tl.constexpr):
    """Whether a query at `position` attends to `key`."""
    seen = key <= position
    if WINDOW:
        seen &= key > position - window
    return seen


@triton.jit
def _capped(scores, softcap):
    """`softcap * tanh(scores / softcap)`, as near as float32 comes to it for small scores too."""
    x = scores * (1.0 / softcap)
    # Below 5/8 a polynomial (tanhf of Cephes, by S. Moshier): of a sum with 1 the last digits would be lost.
    large = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    square = x * x
    more = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square + 1.33314422036e-1
    more = (more * square - 3.33332819422e-1) * square * x
    return softcap * tl.where(square < 0.390625, x + more, large)


@triton.jit
def _unit(scales):
    """The power of 2 in the largest of `scales`, from 2^-126 to 2^126, and 1 through it. Both multiply exactly."""
    exponent = tl.max(scales, 0).to(tl.int32, bitcast=True) >> 23 & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _add_keys(
    scores, visible, values, scales, softcap, largest, weights, sums, SOFTCAP: tl.constexpr, SCALED: tl.constexpr
):
    """One step of the online softmax: some more keys. `largest` and `weights` [BLOCK_M], `sums` [BLOCK_M, BLOCK_D].

    With SCALED, `values` are to be multiplied by `scales` [BLOCK_N]; weights are instead, in a unit that keeps them
    from vanishing in float16. It depends on the other keys, but no rounding does, unless numbers get too small for
    their type.
    """
    if SOFTCAP:
        scores = _capped(scores, softcap)
    # Weights are powers of 2: log2(e) = 1.4427.
    scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # of rows that have seen no key yet
    shrink = tl.exp2(largest - finite)
    weight = tl.exp2(scores - finite[:, None])
    weights = weights * shrink + tl.sum(weight, 1)
    if SCALED:
        unit, through = _unit(scales)
        weight = weight * (scales * through)[None, :]
        more = tl.dot(weight.to(values.dtype), values, input_precision="tf32x3")
        sums = sums * shrink[:, None] + more * unit
    else:
        sums = tl.dot(weight.to(values.dtype), values, sums * shrink[:, None], input_precision="tf32x3")
    return highest, weights, sums


@triton.jit
def _spans(first, end, span, parts, BLOCK_N: tl.constexpr, LIVE: tl.constexpr):
    """Begin of the first span, and keys in each span, of a tile that sees keys `first` to `end`.

    Spans begin at multiples of `span`, whatever the sequence. With LIVE they divide what the tile sees, so that the
    launch need not know how much that is.
    """
    origin = first * 0
    if LIVE:
        origin = first
        span = tl.maximum(span, tl.cdiv(tl.cdiv(end - first, parts), BLOCK_N) * BLOCK_N)
    return origin, span


@triton.jit
def _keys_of(part, first, end, span, parts, BLOCK_N: tl.constexpr, LIVE: tl.constexpr):
    """The keys of one span of a tile that sees keys `first` to `end`: from the first result to the second."""
    origin, span = _spans(first, end, span, parts, BLOCK_N, LIVE)
    return tl.maximum(first, origin + part * span), tl.minimum(end, origin + (part + 1) * span)


@triton.jit
def _keys_and_values(
    k_pages, v_pages, k_scales, v_scales, table, key, is_key, kv_head, columns, is_column, like,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORM: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D] in the type of `like`, and what they are to be multiplied
    by, float32 [BLOCK_N]: of int8 alone, anything otherwise. Zeros where `is_key` is not set."""
    page = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64) * KV_HEADS + kv_head
    slot = key % BLOCK_SIZE
    row = row_at(page, slot, HEAD_DIM, BLOCK_SIZE, FORM)
    is_part = is_column[:, None] & is_key[None, :]
    keys = tl.load(k_pages + row[None, :] + columns[:, None], mask=is_part, other=0)
    values = tl.load(v_pages + row[:, None] + columns[None, :], mask=tl.trans(is_part), other=0)
    of_keys, of_values = key, key
    if FORM == "int8":
        of_keys = scales_of(k_scales, page, slot, is_key, HEAD_DIM, BLOCK_SIZE)
        of_values = scales_of(v_scales, page, slot, is_key, HEAD_DIM, BLOCK_SIZE)
    return numbers(keys, like, FORM, NATIVE_FP8), numbers(values, like, FORM, NATIVE_FP8), of_keys, of_values


@triton.jit
def attend(
    q,  # [T, H, D], tokens `q_stride` elements apart
    k_pages,  # [blocks, KV_HEADS] pages, as `kv_pages.py` describes them
    v_pages,
    k_scales, v_scales,
    out,  # [T, H, D]; of one span per tile
    partial_out,  # float32 [spans, tiles, KV_HEADS, BLOCK_M, D]; of several
    partial_stats,  # float32 [spans, tiles, KV_HEADS, 2, BLOCK_M]   largest score (of base 2) and sum of weights
    block_tables,  # int32 [R, table_stride]
    table_rows,  # int32 [S]   of `block_tables`
    query_start_loc,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    tile_seqs,  # int32 [tiles]
    tile_rows,  # int32 [tiles]   the tile's first token, counted from its sequence's first in the batch
    q_stride, table_stride, scale, softcap, window,
    span,  # keys for one program: a multiple of BLOCK_N
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of 2 from HEAD_DIM on
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SPANS: tl.constexpr,  # whether there are several
    LIVE: tl.constexpr,  # whether all programs share a tile's keys, `span` being the fewest of one
    FORM: tl.constexpr, NATIVE_FP8: tl.constexpr,
):  # fmt: skip
    """One tile for one KV head and one span of keys."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, token, count, first_position = _tile(tile, tile_seqs, tile_rows, query_start_loc, seq_lens, BLOCK_M // GROUP)
    first_key, start = _first_key(first_position, window, BLOCK_N, WINDOW)
    end = first_position + count
    if SPANS:
        start, end = _keys_of(part, start, end, span, tl.num_programs(2), BLOCK_N, LIVE)
        if start >= end:
            return
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    table = block_tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    head, position = kv_head * GROUP + rows % GROUP, first_position + rows // GROUP
    place = (token + rows // GROUP).to(tl.int64)
    is_row, is_column = rows // GROUP < count, columns < HEAD_DIM
    inside = is_row[:, None] & is_column[None, :]
    queries = tl.load(q + (place * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
    largest, weights = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        # Other keys may lie in pages that were freed, or that hold what another sequence left.
        is_key = (key >= first_key) & (key < end)
        keys, values, key_scales, value_scales = _keys_and_values(
            k_pages, v_pages, k_scales, v_scales, table, key, is_key, kv_head, columns, is_column, queries,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, FORM, NATIVE_FP8,
        )  # fmt: skip
        scores = tl.dot(queries, keys, input_precision="tf32x3") * scale  # [BLOCK_M, BLOCK_N]
        if FORM == "int8":
            scores *= key_scales[None, :]
        visible = is_key[None, :] & _is_seen(key[None, :], position[:, None], window, WINDOW)
        largest, weights, sums = _add_keys(
            scores, visible, values, value_scales, softcap, largest, weights, sums, SOFTCAP, FORM == "int8"
        )
    if SPANS:
        spot = ((part * tl.num_programs(0) + tile).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M
        tl.store(partial_out + (spot + rows)[:, None] * HEAD_DIM + columns[None, :], sums, mask=inside)
        tl.store(partial_stats + spot * 2 + rows, largest, mask=is_row)
        tl.store(partial_stats + spot * 2 + BLOCK_M + rows, weights, mask=is_row)
    else:
        into = out + ((place * KV_HEADS * GROUP + head) * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(into, sums / tl.where(is_row, weights, 1.0)[:, None], mask=inside)


@triton.jit
def merge_spans(
    partial_out,
    partial_stats,
    out,
    query_start_loc,
    seq_lens,
    tile_seqs,
    tile_rows,
    window,
    span,
    parts,  # programs of `attend` for a tile
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    LIVE: tl.constexpr,
):
    """Merges what `attend` left of one row, span by span. Arguments are those of `attend`."""
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    _, token, count, first_position = _tile(tile, tile_seqs, tile_rows, query_start_loc, seq_lens, QUERIES)
    if row // GROUP >= count:
        return
    _, start = _first_key(first_position, window, BLOCK_N, WINDOW)
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < HEAD_DIM
    largest = start * 0.0 - float("inf")
    weights = start * 0.0
    sums = tl.zeros([BLOCK_D], tl.float32)
    end = first_position + count
    origin, span = _spans(start, end, span, parts, BLOCK_N, LIVE)
    for part in range((start - origin) // span, (end - 1 - origin) // span + 1):
        spot = ((part * tl.num_programs(0) + tile).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M
        highest_here = tl.load(partial_stats + spot * 2 + row)
        weights_here = tl.load(partial_stats + spot * 2 + BLOCK_M + row)
        sums_here = tl.load(partial_out + (spot + row) * HEAD_DIM + columns, mask=is_column, other=0.0)
        highest = tl.maximum(largest, highest_here)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        before, here = tl.exp2(largest - finite), tl.exp2(highest_here - finite)
        weights = weights * before + weights_here * here
        sums = sums * before + sums_here * here
        largest = highest
    place = (token + row // GROUP).to(tl.int64) * KV_HEADS * GROUP + kv_head * GROUP + row % GROUP
    tl.store(out + place * HEAD_DIM + columns, sums / weights, mask=is_column)
