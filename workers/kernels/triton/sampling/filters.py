"""Draws of filtered rows from the few blocks that hold their largest logits; if these are not enough, in rounds.

The kept set is a prefix of the ids in order of logit, then of id. Masses are integers in units of 2^-30 of the
likeliest id's mass, so that their sums do not depend on the order of addition.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.choose import (
    BLOCK,
    FINITE,
    changed_row,
    first_of,
    gumbel,
    gumbel_screen,
    inverse,
    is_filtered,
    margin_at,
    middle_of,
    noise_words,
    ordered,
    threshold,
    value_of,
)

_UNIT = tl.constexpr(float(1 << 30))


@triton.jit
def is_before(x, ids, value, end):
    """Return whether logits come before the pair (value, end) in the order. Logits of -inf never do."""
    return ((x > value) | ((x == value) & (ids < end))) & (x > float("-inf"))


@triton.jit
def units_up_to(share, total):
    """Return the smallest integer that is not below `share` of `total`, a float64."""
    return tl.ceil(share.to(tl.float64) * total).to(tl.int64)


@triton.jit
def first_k(kept, values, weights, wanted):
    """Return the shortest prefix of `kept`, in order of logit, then of id, whose `weights` sum up to at least `wanted`.

    `kept` is in order of ids. Equal values have equal weights, above 0. The whole sum is at least `wanted`.
    """
    weights = tl.where(kept, weights, 0)
    least = threshold(values, weights, wanted)
    above = kept & (values > least)
    equal = kept & (values == least)
    each = tl.max(tl.where(equal, weights, 0))
    missing = wanted - tl.sum(tl.where(above, weights, 0).to(tl.int64))
    count = (missing + each - 1) // tl.maximum(each, 1)
    return above | (equal & (tl.cumsum(equal.to(tl.int32)) <= count))


@triton.jit
def draw_kept(
    logits,
    adjusted,
    short,
    short_end,
    totals,
    peaks,
    floors,
    pending,  # int32 [L]   output: 1 if these blocks are not enough
    tokens,
    states,
    changed,
    target_ids,
    temperature,
    top_p,
    top_k,
    keys,
    first,
    stride,
    vocab,
    SHORT: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """Draw filtered rows from the blocks `short`, which hold the largest logits. Other arguments: see `choose`."""
    index = tl.program_id(0)
    row = first + index
    tl.store(pending + index, 0)
    hot, nucleus, k, least = (
        tl.load(temperature + row), tl.load(top_p + row), tl.load(top_k + row), tl.load(floors + index),
    )  # fmt: skip
    if (tl.load(target_ids + row) >= 0) | (tl.load(states + row) != FINITE):
        return
    if is_filtered(hot, nucleus, k, least > float("-inf"), vocab) == 0:
        return
    lane = tl.arange(0, SHORT * 128)
    block = tl.load(short + index * SHORT + lane // BLOCK)
    ids = block * BLOCK + lane % BLOCK
    x = changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED)
    values = tl.load(x + ids, (block >= 0) & (ids < vocab), float("-inf"))
    peak, scale = tl.load(peaks + index), inverse(hot)
    value = tl.load(short_end + 2 * index).to(tl.float32, bitcast=True)
    kept = is_before(values, ids, value, tl.load(short_end + 2 * index + 1)) & (values >= least)
    count = tl.sum(kept.to(tl.int32))
    whole = (value == float("-inf")) | (least > value)
    limited = (k > 0) & (k < vocab)
    if limited & (k <= count):
        kept = first_k(kept, values, tl.full(lane.shape, 1, tl.int32), k)
        whole = True
    enough = whole
    if nucleus < 1:
        units = tl.where(kept, (tl.exp((values - peak) * scale) * _UNIT + 0.5).to(tl.int32), 0)
        mass = tl.sum(units.to(tl.int64))
        total = mass.to(tl.float64)
        if whole == 0:
            total = tl.load(totals + index) * _UNIT
            enough = (limited == 0) & (least == float("-inf"))
        wanted = tl.maximum(units_up_to(nucleus, total), 1)
        enough = enough & (mass >= wanted)
        if enough:
            kept = first_k(kept & (units > 0), values, units, wanted)
    if enough:
        tl.store(tokens + row, _drawn_from(kept, values, ids, peak, hot, scale, keys + 2 * row))
    else:
        tl.store(pending + index, 1)


@triton.jit
def _drawn_from(kept, values, ids, peak, temperature, scale, keys):
    """Return the id with the largest `(x - peak) / temperature + noise`, the first among equals."""
    key, factor = tl.load(keys), tl.load(keys + 1)
    screen = tl.where(kept, (values - peak) * scale + gumbel_screen(noise_words(ids, key, factor)), float("-inf"))
    near = kept & (screen >= tl.max(screen) - margin_at(peak * 0, temperature))
    best, token = tl.full([], float("-inf"), tl.float64), 0
    for _ in range(tl.sum(near.to(tl.int32))):
        ident = first_of(near, ids)
        near &= ids != ident
        value = tl.max(tl.where(ids == ident, values, float("-inf")))
        score = (value.to(tl.float64) - peak.to(tl.float64)) / temperature.to(tl.float64)
        score += gumbel(noise_words(ident, key, factor))
        if score > best:
            best = score
            token = ident
    return token


_LEAST_FINITE = tl.constexpr(-0x7F800000)  # `ordered` of the lowest finite float32
_ALL_IDS = tl.constexpr(0x7FFFFFFF)
_ROUNDS_UNIT = tl.constexpr(float(1 << 40))  # finer than in `draw_kept`, because more masses are added


@triton.jit
def _tile(x, listed, count, tile, vocab, TILE: tl.constexpr):
    """Load the logits and ids of a tile of the listed blocks, in the order of ids: each [TILE * 128]."""
    lane = tl.arange(0, TILE * 128)
    slot = tile * TILE + lane // BLOCK
    ids = tl.load(listed + slot, slot < count, 0) * BLOCK + lane % BLOCK
    return tl.load(x + ids, (slot < count) & (ids < vocab), float("-inf")), ids


@triton.jit
def draw_in_rounds(
    logits,
    adjusted,
    listed,
    num_listed,
    peaks,
    floors,
    pending,
    tokens,
    changed,
    temperature,
    top_p,
    top_k,
    keys,
    first,
    stride,
    vocab,
    blocks,
    TILE: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """Draw rows that `draw_kept` left pending, in rounds. Arguments are the same as in `choose` and `draw_kept`.

    Uses rejection sampling, as in `workers/sampling/top_k_top_p.py`. Each row has one program, which reads only the
    blocks that `choose` listed, a few per tile.
    """
    index = tl.program_id(0)
    row = first + index
    if tl.load(pending + index) == 0:
        return
    x = changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED)
    hot, nucleus, k, least = (
        tl.load(temperature + row), tl.load(top_p + row), tl.load(top_k + row), tl.load(floors + index),
    )  # fmt: skip
    listed += index * blocks
    count, peak, scale = tl.load(num_listed + index), tl.load(peaks + index), inverse(hot)
    value, end = least, _ALL_IDS
    if (k > 0) & (k < vocab):
        value, end = _first_k(x, listed, count, k, least, peak, vocab, TILE)
    total = tl.full([], 0, tl.int64)
    if nucleus < 1:
        total = _mass(x, listed, count, value, end, peak, scale, vocab, TILE)
    wanted = units_up_to(nucleus, total.to(tl.float64))
    token, rejected = 0, True
    while rejected:
        token = _drawn(x, listed, count, value, end, peak, hot, scale, keys + 2 * row, vocab, TILE)
        rejected = False
        if nucleus < 1:
            value, end = tl.load(x + token), token
            before = _mass(x, listed, count, value, end, peak, scale, vocab, TILE)
            rejected = (before >= wanted) & (before > 0)
    tl.store(tokens + row, token)


@triton.jit
def _first_k(x, listed, count, k, least, peak, vocab, TILE: tl.constexpr):
    """Return the pair after the k largest logits from `least` on, or after all of these if they are fewer."""
    low = tl.maximum(ordered(least), _LEAST_FINITE)
    high = ordered(peak) + 1
    above = 0  # number of logits from `high` on
    end = _ALL_IDS
    if _count(x, listed, count, low, vocab, TILE) >= k:
        while low < high - 1:
            middle = middle_of(low, high)
            found = _count(x, listed, count, middle, vocab, TILE)
            if found >= k:
                low = middle
            else:
                high = middle
                above = found
        end = _end_of_equal(x, listed, count, low, k - above, vocab, TILE)
    return value_of(low), end


@triton.jit
def _count(x, listed, count, order, vocab, TILE: tl.constexpr):
    """Return the number of logits that are at least the value of `order`."""
    found = 0
    for tile in range(tl.cdiv(count, TILE)):
        values, _ = _tile(x, listed, count, tile, vocab, TILE)
        found += tl.sum((ordered(values) >= order).to(tl.int32))
    return found


@triton.jit
def _end_of_equal(x, listed, count, order, wanted, vocab, TILE: tl.constexpr):
    """Return one more than the id of the `wanted`-th logit with the value of `order`, counted from the lowest id."""
    end, found = 0, 0
    for tile in range(tl.cdiv(count, TILE)):
        values, ids = _tile(x, listed, count, tile, vocab, TILE)
        equal = (ordered(values) == order).to(tl.int32)
        last = (equal > 0) & (found + tl.cumsum(equal) == wanted)
        end = tl.maximum(end, tl.max(tl.where(last, ids + 1, 0)))
        found += tl.sum(equal)
    return end


@triton.jit
def _mass(x, listed, count, value, end, peak, scale, vocab, TILE: tl.constexpr):
    total = tl.full([], 0, tl.int64)
    for tile in range(tl.cdiv(count, TILE)):
        values, ids = _tile(x, listed, count, tile, vocab, TILE)
        units = (tl.exp((values - peak) * scale) * _ROUNDS_UNIT).to(tl.int64)
        total += tl.sum(tl.where(is_before(values, ids, value, end), units, 0))
    return total


@triton.jit
def _drawn(x, listed, count, value, end, peak, temperature, scale, keys, vocab, TILE: tl.constexpr):
    """Return the id with the largest `x / temperature + noise` before the pair, the lowest among equals."""
    key, factor = tl.load(keys), tl.load(keys + 1)
    margin = margin_at(peak, temperature)
    highest = float("-inf")
    best, token = tl.full([], float("-inf"), tl.float64), 0
    for tile in range(tl.cdiv(count, TILE)):
        values, ids = _tile(x, listed, count, tile, vocab, TILE)
        left = is_before(values, ids, value, end)
        screen = (values - peak) * scale + gumbel_screen(noise_words(ids, key, factor))
        screen = tl.where(left, screen, float("-inf"))
        highest = tl.maximum(highest, tl.max(screen))
        near = left & (screen >= highest - margin)
        for _ in range(tl.sum(near.to(tl.int32))):
            ident = first_of(near, ids)
            near &= ids != ident
            score = tl.load(x + ident).to(tl.float64) / temperature.to(tl.float64)
            score += gumbel(noise_words(ident, key, factor))
            if score > best:
                best = score
                token = ident
    return token
