"""Division of the keys of tiles among programs, as in Flash-Decoding, and the merge of the programs' results.

A tile is some query tokens of one sequence, for the query heads of one KV head, or for one group of the query heads
that share the only KV head. Its rows are pairs of a token and a head: row r is query token r // GROUP of the tile, and
head r % GROUP of its heads. A program computes one tile over one span of its keys. The device computes the division
once per step, so the host need not know the lengths.
"""

import triton
import triton.language as tl

# Rows of the table that `plan_spans` writes, with one column per program.
TOKEN: tl.constexpr = tl.constexpr(0)  # the tile's first query token, as index in the batch
COUNT: tl.constexpr = tl.constexpr(1)  # number of its query tokens
POSITION: tl.constexpr = tl.constexpr(2)  # position of the first query token
BEGIN: tl.constexpr = tl.constexpr(3)  # range of the program's keys
STOP: tl.constexpr = tl.constexpr(4)
TABLE: tl.constexpr = tl.constexpr(5)  # row of `block_tables`
PARTS: tl.constexpr = tl.constexpr(6)  # programs that share the tile's keys
PLANNED = 7  # number of rows


@triton.jit
def first_visible(position, window, CHUNKED: tl.constexpr):
    """Return the first key that a query at `position` sees. `window`: its length in keys, or a chunk's."""
    first = tl.maximum(position - window + 1, 0)
    if CHUNKED:
        first = position - position % window
    return first


@triton.jit
def _tiles(
    at, tile_seqs, tile_rows, query_start_loc, seq_lens, window, tiles, QUERIES, BLOCK_N, CHUNKED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Return some tiles from index `at` on.

    For each: sequence, first token in the batch, number of tokens, position of the first token, and the range of
    visible keys, from the start of a block to the end.
    """
    tile = at + tl.arange(0, SIZE)
    is_tile = tile < tiles
    seq = tl.load(tile_seqs + tile, mask=is_tile, other=0)
    row = tl.load(tile_rows + tile, mask=is_tile, other=0)
    start = tl.load(query_start_loc + seq)
    length = tl.load(query_start_loc + seq + 1) - start
    position = tl.load(seq_lens + seq) - length + row
    count = tl.where(is_tile, tl.maximum(tl.minimum(length - row, QUERIES), 0), 0)
    first = first_visible(position, window, CHUNKED) // BLOCK_N * BLOCK_N
    end = tl.where(count > 0, position + count, first)
    return seq, start + row, count, position, first, end


_OF_ARRAYS = ["tile_seqs", "tile_rows", "query_start_loc", "seq_lens", "table_rows"]
_PLAN_NUMBERS = ["window", "least", "extra", "tiles", "num_programs", "QUERIES", "BLOCK_N"]


@triton.jit(do_not_specialize=_PLAN_NUMBERS, do_not_specialize_on_alignment=_OF_ARRAYS)
def plan_spans(
    tile_seqs,  # int32 [tiles]
    tile_rows,  # int32 [tiles]   the tile's first token, relative to its sequence's first token in the batch
    query_start_loc,  # int32 [S + 1]
    seq_lens,  # int32 [S]
    table_rows,  # int32 [S]   rows of `block_tables`
    planned,  # int32 [PLANNED, num_programs]
    of_tiles,  # int32 [2, tiles]   a tile's first program, and its number of programs
    window,  # larger than the number of keys: no window; with CHUNKED the length of chunks
    least,  # minimum number of keys of a program; a multiple of BLOCK_N
    extra,  # additional programs, besides one for each tile
    tiles,
    num_programs,  # programs: at least `tiles + extra`
    QUERIES,  # tokens of a tile
    BLOCK_N,
    FIXED: tl.constexpr,  # spans have `least` keys and begin at multiples of it
    CHUNKED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Divide the keys of all tiles evenly among programs, for any lengths.

    A long sequence among short ones gets programs in proportion to its keys. This is one program; unused columns get no
    keys.
    """
    span = least
    if not FIXED:
        keys = tl.zeros([SIZE], tl.int32)
        for at in range(0, tiles, SIZE):
            _, _, _, _, first, end = _tiles(
                at, tile_seqs, tile_rows, query_start_loc, seq_lens, window, tiles, QUERIES, BLOCK_N, CHUNKED, SIZE
            )
            keys += (end - first + extra - 1) // extra  # divided before the sum, which could overflow
        span = tl.maximum(least, (tl.sum(keys, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    program = 0
    for at in range(0, tiles, SIZE):
        seq, token, count, position, first, end = _tiles(
            at, tile_seqs, tile_rows, query_start_loc, seq_lens, window, tiles, QUERIES, BLOCK_N, CHUNKED, SIZE
        )
        tile, origin = at + tl.arange(0, SIZE), first
        if FIXED:
            origin = first // span * span
        parts = tl.where(count > 0, (end - origin + span - 1) // span, 0)
        behind = program + tl.cumsum(parts, 0)
        tl.store(of_tiles + tile, behind - parts, mask=tile < tiles)
        tl.store(of_tiles + tiles + tile, parts, mask=tile < tiles)
        row = tl.load(table_rows + seq)
        for part in range(tl.max(parts, 0)):
            into, here = planned + behind - parts + part, part < parts
            tl.store(into + TOKEN * num_programs, token, mask=here)
            tl.store(into + COUNT * num_programs, count, mask=here)
            tl.store(into + POSITION * num_programs, position, mask=here)
            tl.store(into + BEGIN * num_programs, tl.maximum(first, origin + part * span), mask=here)
            tl.store(into + STOP * num_programs, tl.minimum(end, origin + (part + 1) * span), mask=here)
            tl.store(into + TABLE * num_programs, row, mask=here)
            tl.store(into + PARTS * num_programs, parts, mask=here)
        program += tl.sum(parts, 0)
    nothing = tl.zeros([SIZE], tl.int32)
    for at in range(program, num_programs, SIZE):
        left = at + tl.arange(0, SIZE)
        tl.store(planned + BEGIN * num_programs + left, nothing, mask=left < num_programs)
        tl.store(planned + STOP * num_programs + left, nothing, mask=left < num_programs)


@triton.jit
def span_of(plan, num_programs):
    """Return the keys of the program with the column `plan` of the table: from the first to before the second.

    An unused program has none.
    """
    return tl.load(plan + BEGIN * num_programs), tl.load(plan + STOP * num_programs)


@triton.jit
def tile_of(plan, num_programs, block_tables, table_stride):
    """Return the tile of the program with the column `plan` of the table.

    These are its first query token, the number of its tokens, the position of the first, the block table of its
    sequence, and the number of programs that share its keys.
    """
    token, count = tl.load(plan + TOKEN * num_programs), tl.load(plan + COUNT * num_programs)
    position, parts = tl.load(plan + POSITION * num_programs), tl.load(plan + PARTS * num_programs)
    table = block_tables + tl.load(plan + TABLE * num_programs).to(tl.int64) * table_stride
    return token, count, position, table, parts


@triton.jit
def store_tile(
    sums, largest, weights,  # of the rows [BLOCK_M, BLOCK_D], [BLOCK_M] and [BLOCK_M]
    inside, is_row, parts, block,
    out_row,  # int64 [BLOCK_M]   row of `out` of each row
    partial_out, partial_stats, out, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the results of a program for the block of heads with number `block`, of `BLOCKS`: for `merge_spans` if
    several programs share the tile, and otherwise to `out` [T * H, WIDTH]."""
    rows, columns = tl.arange(0, sums.shape[0]), tl.arange(0, sums.shape[1])
    if parts > 1:
        spot = (tl.program_id(0).to(tl.int64) * BLOCKS + block) * sums.shape[0]
        tl.store(partial_out + (spot + rows)[:, None] * WIDTH + columns[None, :], sums, mask=inside)
        tl.store(partial_stats + spot * 2 + rows, largest, mask=is_row)
        tl.store(partial_stats + spot * 2 + sums.shape[0] + rows, weights, mask=is_row)
    else:
        into = out + (out_row * WIDTH)[:, None] + columns[None, :]
        tl.store(into, sums / tl.where(is_row, weights, 1.0)[:, None], mask=inside)


@triton.jit
def with_sink(weights, largest, sink):
    """Add the weight of the head's sink, relative to 2^`largest`, to the sum of weights.

    An infinite sink leaves no weight for the keys.
    """
    return weights + tl.exp2(sink * 1.4426950408889634 - largest)


@triton.jit(do_not_specialize=["tiles", "num_programs", "BLOCK_M"])
def merge_spans(
    partial_out,
    partial_stats,
    out,
    sinks,
    planned,
    of_tiles,  # int32 [2, tiles], from `plan_spans`
    tiles,
    num_programs,
    BLOCK_M,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # programs whose results are merged in one step; 1: in the order of keys, for fixed spans
):
    """Merge the results of the programs that share a tile, for one row.

    A long context has hundreds of programs, and each step waits for its loads. Other arguments: see `attend` in
    `paged_attention.py`.
    """
    tile, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, parts = tl.load(of_tiles + tile), tl.load(of_tiles + tiles + tile)
    if parts < 2:
        return
    if row // GROUP >= tl.load(planned + COUNT * num_programs + first):
        return
    columns, some = tl.arange(0, BLOCK_D), tl.arange(0, AT_ONCE)
    is_column = columns < HEAD_DIM
    largest = first * 0.0 - float("inf")
    weights = first * 0.0
    sums = tl.zeros([BLOCK_D], tl.float32)
    for number in range(0, parts, AT_ONCE):
        is_part = number + some < parts
        spot = ((first + number + some).to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M
        highest_here = tl.load(partial_stats + spot * 2 + row, mask=is_part, other=float("-inf"))
        weights_here = tl.load(partial_stats + spot * 2 + BLOCK_M + row, mask=is_part, other=0.0)
        source = partial_out + ((spot + row) * HEAD_DIM)[:, None] + columns[None, :]
        sums_here = tl.load(source, mask=is_part[:, None] & is_column[None, :], other=0.0)
        highest = tl.maximum(largest, tl.max(highest_here, 0))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        before, here = tl.exp2(largest - finite), tl.exp2(highest_here - finite)
        weights = weights * before + tl.sum(weights_here * here, 0)
        sums = sums * before + tl.sum(sums_here * here[:, None], 0)
        largest = highest
    token, head = tl.load(planned + TOKEN * num_programs + first) + row // GROUP, kv_head * GROUP + row % GROUP
    if SINKS:
        weights = with_sink(weights, largest, tl.load(sinks + head))
    out_row = token.to(tl.int64) * KV_HEADS * GROUP + head
    tl.store(out + out_row * HEAD_DIM + columns, sums / weights, mask=is_column)
