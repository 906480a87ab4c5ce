"""Sampling without filters if a row's logits are split over ranks: the best id of each rank, and of all ranks.

A token's score is its logit, or the sum of the logit and the noise of its id. It depends on nothing else in the row, so
the best id of all ranks is the best of the whole row. Helpers are in `choose.py`.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.choose import (
    ALL_BANNED,
    FINITE,
    NONFINITE,
    changed_row,
    drawn,
    largest,
)

FOUND = 4  # float64 values of a rank for a row: score, id, largest logit, number of ids not masked or banned


@triton.jit
def best_of_shard(
    logits,
    adjusted,
    maxima,
    screens,
    allowed,
    banned,
    found,  # float64 [L, FOUND]
    changed,
    temperature,
    top_k,
    keys,
    first,
    first_id,
    stride,
    vocab,
    blocks,
    tiles,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    RANDOM: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """Find this rank's best id of a row. Arguments are the same as in `survey` and `choose`."""
    place, block = tl.program_id(0), tl.arange(0, WIDTH)
    row, at_row, inside = first + place, place * blocks, block < blocks
    top = tl.load(maxima + at_row + block, inside, float("-inf"))
    peak = tl.max(top)
    best, token = tl.full([], float("-inf"), tl.float64), 0
    if (peak > float("-inf")) & (peak < float("inf")):
        x = changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED)
        hot, k = tl.load(temperature + row), tl.load(top_k + row)
        if (hot == 0) | (k == 1):
            token = largest(x, top, peak, block, vocab)
            best = peak.to(tl.float64)
        elif RANDOM:
            screen = tl.load(screens + at_row + block, inside, float("-inf"))
            token, best = drawn(x, top, peak, screen, block, hot, keys + 2 * row, first_id, vocab)
    free = tl.full([], 1, tl.int32)
    if PROCESSED:
        is_changed = tl.load(changed + row) > 0
        if is_changed:
            tile = tl.arange(0, TILES)
            counts = tl.load(allowed + place * tiles + tile, tile < tiles, 0)
            free = tl.sum(counts) - tl.load(banned + place)
    into = found + place * 4
    tl.store(into, best)
    tl.store(into + 1, (first_id + token).to(tl.float64))
    tl.store(into + 2, peak.to(tl.float64))
    tl.store(into + 3, free.to(tl.float64))


@triton.jit
def merge_shards(
    parts,  # float64 [RANKS, L, FOUND]
    tokens,
    states,
    changed,
    target_ids,
    first,
    rows,  # L
    RANKS: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """Take the best of all ranks' ids, the lowest among equals: ranks are in the order of their ids."""
    place = tl.program_id(0)
    row = first + place
    peak = tl.full([], float("-inf"), tl.float64)
    best, free, found = peak, tl.full([], 0.0, tl.float64), 0
    for rank in range(RANKS):
        part = parts + (rank * rows + place) * 4
        score = tl.load(part)
        found = tl.where(score > best, tl.load(part + 1).to(tl.int32), found)
        best = tl.maximum(best, score)
        peak = tl.maximum(peak, tl.load(part + 2))
        free += tl.load(part + 3)
    state = tl.where((peak > float("-inf")) & (peak < float("inf")), FINITE, NONFINITE)
    if PROCESSED:
        is_empty = (peak == float("-inf")) & (tl.load(changed + row) > 0) & (free == 0)
        state = tl.where(is_empty, ALL_BANNED, state)
    target = tl.load(target_ids + row)
    tl.store(states + row, state)
    tl.store(tokens + row, tl.where((target < 0) & (state == FINITE), found, tl.maximum(target, 0)))
