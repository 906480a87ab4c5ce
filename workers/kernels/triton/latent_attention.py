"""Causal latent attention over paged rows that serve all heads: decode, chunked prefill and prefill.

The row of a token is its key, and the first elements of the row are its value (`latent_pages.py`), so a row is read
once for both. The algorithm is that of `paged_attention.py`, with the tiles and the division of keys of `key_spans.py`.
The query heads are divided into `BLOCKS` groups of `GROUP` heads, and a tile has the heads of one group.

Every block of keys is computed with masks. Compared with a row's width they take no time, and without a second loop the
registers suffice for larger tiles.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.key_spans import span_of, store_tile, tile_of
from oarlock.workers.kernels.triton.kv_pages import load_scales, values_in
from oarlock.workers.kernels.triton.latent_pages import LATENT, OTHERS, latent_row_at, latent_scale_at
from oarlock.workers.kernels.triton.paged_attention import add_keys


@triton.jit
def _with_latents(
    scores, queries, q_rows, key_rows, latents, is_row, is_key, RANK: tl.constexpr, CHUNK: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of the latent parts of queries and keys to `scores`, float32 [BLOCK_M, BLOCK_N].

    Rows of 8 bits are read again at `key_rows` [1, BLOCK_N], from a cache, because both copies can then be on their way
    while other keys are computed; a transposition after the conversion would wait for them. With CHUNK, queries are
    read again too, at `q_rows` [BLOCK_M, 1], and some elements of both at a time: in float32, registers do not suffice
    for all elements of the queries.
    """
    if CHUNK:
        for first in range(0, RANK, CHUNK):
            column = first + tl.arange(0, CHUNK)
            inside = column < RANK
            some = tl.load(q_rows + column[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            keys = tl.load(key_rows + column[:, None], mask=inside[:, None] & is_key[None, :], other=0)
            scores = tl.dot(some, values_in(keys, some, FORMAT, NATIVE_FP8), scores, input_precision=PRECISION)
    elif FORMAT == "":
        scores = tl.dot(queries, tl.trans(latents), scores, input_precision=PRECISION)
    else:
        column = tl.arange(0, queries.shape[1])
        keys = tl.load(key_rows + column[:, None], mask=(column < RANK)[:, None] & is_key[None, :], other=0)
        scores = tl.dot(queries, values_in(keys, queries, FORMAT, NATIVE_FP8), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _block(
    at, queries, rotated, q_rows, is_row, position, stop, pages, scales, table, scale, largest, weights, sums,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process the block of keys from `at` on, limited to those before `stop`.

    Other keys may be in pages that were freed, or that hold data of another sequence.
    """
    WIDTH: tl.constexpr = RANK + ROPE
    columns, others = tl.arange(0, sums.shape[1]), tl.arange(0, rotated.shape[1])
    key = at + tl.arange(0, BLOCK_N)
    is_key = key < stop
    page, slot = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64), key % BLOCK_SIZE
    rows = pages + latent_row_at(page, slot, WIDTH, BLOCK_SIZE, FORMAT)
    key_rows = rows[None, :]
    latents = tl.load(rows[:, None] + columns[None, :], mask=is_key[:, None] & (columns < RANK)[None, :], other=0)
    keys = tl.load(key_rows + RANK + others[:, None], mask=(others < ROPE)[:, None] & is_key[None, :], other=0)
    latents = values_in(latents, rotated, FORMAT, NATIVE_FP8)  # [BLOCK_N, BLOCK_D]
    keys = values_in(keys, rotated, FORMAT, NATIVE_FP8)  # [BLOCK_R, BLOCK_N]
    latent_scales = key  # unused, unless rows are of int8
    if FORMAT == "int8":
        latent_scales = load_scales(scales + latent_scale_at(page, slot, LATENT, WIDTH, BLOCK_SIZE), is_key)
        key_scales = load_scales(scales + latent_scale_at(page, slot, OTHERS, WIDTH, BLOCK_SIZE), is_key)
        scores = tl.zeros([position.shape[0], BLOCK_N], tl.float32)
        scores = _with_latents(
            scores, queries, q_rows, key_rows, latents, is_row, is_key, RANK, CHUNK, FORMAT, NATIVE_FP8, PRECISION
        )
        scores *= latent_scales[None, :]
        scores += tl.dot(rotated, keys, input_precision=PRECISION) * key_scales[None, :]
    else:
        scores = tl.dot(rotated, keys, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = _with_latents(
            scores, queries, q_rows, key_rows, latents, is_row, is_key, RANK, CHUNK, FORMAT, NATIVE_FP8, PRECISION
        )
    visible = is_key[None, :] & (key[None, :] <= position[:, None])
    return add_keys(
        scores, visible, latents, latent_scales, scale, 0.0, largest, weights, sums, False, FORMAT == "int8", True,
        PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_programs"])
def attend_latent(
    q,  # [T, BLOCKS * GROUP, RANK + ROPE], tokens `q_stride` elements apart
    pages,  # [blocks] pages, see `latent_pages.py`
    scales,
    out,  # [T, BLOCKS * GROUP, RANK]
    partial_out,  # float32 [num_programs, BLOCKS, BLOCK_M, RANK]; for tiles that several programs share
    partial_stats,  # float32 [num_programs, BLOCKS, 2, BLOCK_M]   largest score (base 2) and sum of weights
    block_tables,  # int32 [R, table_stride]
    planned,  # int32 [PLANNED, num_programs], from `plan_spans`
    q_stride, table_stride, scale, num_programs,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,  # RANK and ROPE rounded up to powers of 2
    CHUNK: tl.constexpr,  # elements of latents that are multiplied at a time; 0: all
    FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 matmuls: depends on the device
):  # fmt: skip
    """Compute one tile for one group of query heads and one span of keys."""
    plan, block = planned + tl.program_id(0), tl.program_id(1)
    begin, stop = span_of(plan, num_programs)
    if begin >= stop:
        return
    token, count, first_position, table, parts = tile_of(plan, num_programs, block_tables, table_stride)
    rows, columns, others = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    head, position = block * GROUP + rows % GROUP, first_position + rows // GROUP
    query = (token + rows // GROUP).to(tl.int64)
    is_row = rows // GROUP < count
    inside = is_row[:, None] & (columns < RANK)[None, :]
    q_rows = (q + query * q_stride + head * (RANK + ROPE))[:, None]
    rotated = tl.load(q_rows + RANK + others[None, :], mask=is_row[:, None] & (others < ROPE)[None, :], other=0.0)
    queries = rotated  # unused with CHUNK
    if CHUNK == 0:
        queries = tl.load(q_rows + columns[None, :], mask=inside, other=0.0)
    largest, weights = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in range(begin, stop, BLOCK_N):
        largest, weights, sums = _block(
            at, queries, rotated, q_rows, is_row, position, stop, pages, scales, table, scale, largest, weights, sums,
            RANK, ROPE, BLOCK_SIZE, BLOCK_N, CHUNK, FORMAT, NATIVE_FP8, PRECISION,
        )  # fmt: skip
    store_tile(
        sums, largest, weights, inside, is_row, parts, block, query * BLOCKS * GROUP + head, partial_out, partial_stats,
        out, BLOCKS, RANK,
    )  # fmt: skip
