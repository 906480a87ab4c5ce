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


@triton.jit
def write_kv(
    k,  # [T, KV_HEADS, D], tokens `k_stride` elements apart
    v,
    k_pages,  # [blocks, KV_HEADS, BLOCK_SIZE, D]
    v_pages,
    slot_mapping,  # int64 [T]
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # the power of 2 from KV_HEADS * HEAD_DIM on
):
    """Stores one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    place = tl.arange(0, WIDTH)
    head, column = place // HEAD_DIM, place % HEAD_DIM
    into = ((slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + column
    inside = head < KV_HEADS
    tl.store(k_pages + into, tl.load(k + token * k_stride + place, mask=inside), mask=inside)
    tl.store(v_pages + into, tl.load(v + token * v_stride + place, mask=inside), mask=inside)


@triton.jit
def _tile(tile, tile_seqs, tile_rows, query_start_loc, seq_lens, QUERIES: tl.constexpr):
    """Of a tile: its sequence, its first token in the batch, how many tokens, and the first one's position."""
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
def _add_keys(scores, visible, values, softcap, largest, weights, sums, SOFTCAP: tl.constexpr):
    """One step of the online softmax: some more keys. `largest` and `weights` [BLOCK_M], `sums` [BLOCK_M, BLOCK_D]."""
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # softcap * tanh(scores / softcap)
    # Weights are powers of 2: log2(e) = 1.4427.
    scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, 1))
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # of rows that have seen no key yet
    shrink = tl.exp2(largest - finite)
    weight = tl.exp2(scores - finite[:, None])
    weights = weights * shrink + tl.sum(weight, 1)
    sums = tl.dot(weight.to(values.dtype), values, sums * shrink[:, None], input_precision="tf32x3")
    return highest, weights, sums


@triton.jit
def attend(
    q,  # [T, H, D], tokens `q_stride` elements apart
    k_pages,  # [blocks, KV_HEADS, BLOCK_SIZE, D]
    v_pages,
    out,  # [T, H, D]; of one span per tile
    partial_out,  # float32 [spans, tiles, KV_HEADS, BLOCK_M, D]; of several
    partial_stats,  # float32 [spans, tiles, KV_HEADS, 2, BLOCK_M]   largest score (of base 2) and sum of weights
    block_tables,  # int32 [S, table_stride]
    query_start_loc,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    tile_seqs,  # int32 [tiles]
    tile_rows,  # int32 [tiles]   the tile's first token, counted from its sequence's first in the batch
    q_stride,
    table_stride,
    scale,
    softcap,
    window,
    span,  # keys for one program: a multiple of BLOCK_N
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of 2 from HEAD_DIM on
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPANS: tl.constexpr,  # whether there are several
):
    """One tile for one KV head and one span of keys. Spans begin at multiples of `span`, whatever the sequence."""
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, token, count, first_position = _tile(tile, tile_seqs, tile_rows, query_start_loc, seq_lens, BLOCK_M // GROUP)
    first_key, start = _first_key(first_position, window, BLOCK_N, WINDOW)
    end = first_position + count
    if SPANS:
        start = tl.maximum(start, part * span)
        end = tl.minimum(end, (part + 1) * span)
        if start >= end:
            return
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + rows % GROUP
    position = first_position + rows // GROUP
    place = (token + rows // GROUP).to(tl.int64)
    is_row, is_column = rows // GROUP < count, columns < HEAD_DIM
    inside = is_row[:, None] & is_column[None, :]
    queries = tl.load(q + (place * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(start, end, BLOCK_N):
        key = at + tl.arange(0, BLOCK_N)
        # Other keys may lie in pages that were freed, or that hold what another sequence left.
        is_key = (key >= first_key) & (key < end)
        block = tl.load(block_tables + seq * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
        is_part = is_column[:, None] & is_key[None, :]
        keys = tl.load(k_pages + slot[None, :] + columns[:, None], mask=is_part, other=0.0)  # [BLOCK_D, BLOCK_N]
        values = tl.load(v_pages + slot[:, None] + columns[None, :], mask=tl.trans(is_part), other=0.0)
        scores = tl.dot(queries, keys, input_precision="tf32x3") * scale  # [BLOCK_M, BLOCK_N]
        visible = is_key[None, :] & _is_seen(key[None, :], position[:, None], window, WINDOW)
        largest, weights, sums = _add_keys(scores, visible, values, softcap, largest, weights, sums, SOFTCAP)
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
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
    for part in range(start // span, (first_position + count - 1) // span + 1):
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
