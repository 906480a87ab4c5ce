"""Draws of filtered rows from the few blocks that hold their largest logits, where these are enough.

The kept set is a prefix of the ids in order of logit, then of id. Masses are whole numbers of 2^-30 of the likeliest
id's, so that their sums do not depend on an order of addition.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.choose import FINITE, is_filtered
from oarlock.workers.kernels.triton.sampling.noise import gumbel, gumbel_screen, inverse, margin_at, noise_words
from oarlock.workers.kernels.triton.sampling.order import first_of, lowest_kept, threshold
from oarlock.workers.kernels.triton.sampling.survey import BLOCK, changed_row

_UNIT = tl.constexpr(float(1 << 30))


@triton.jit
def is_before(x, ids, value, end):
    """Whether logits come before the pair (value, end) in the order; none of -inf does."""
    return ((x > value) | ((x == value) & (ids < end))) & (x > float("-inf"))


@triton.jit
def units_up_to(share, total):
    """The smallest whole number that is not below `share` of `total`, a float64."""
    return tl.ceil(share.to(tl.float64) * total).to(tl.int64)


@triton.jit
def first_k(kept, values, weights, wanted):
    """The shortest prefix of `kept`, which is in order of ids, whose `weights` have a sum of at least `wanted`.

    Equal values have equal weights, above 0. All of `kept` has at least that sum.
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
    pending,  # int32 [L]   written: 1 where these blocks are not enough
    tokens,
    states,
    changed,
    target_ids,
    temperature,
    top_p,
    top_k,
    min_p,
    keys,
    first,
    stride,
    vocab,
    SHORT: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    """Draws filtered rows from the blocks `short`, which hold the largest logits. Arguments are those of `choose`."""
    place = tl.program_id(0)
    row = first + place
    tl.store(pending + place, 0)
    hot, nucleus, k, least = (
        tl.load(temperature + row), tl.load(top_p + row), tl.load(top_k + row), tl.load(min_p + row),
    )  # fmt: skip
    if (tl.load(target_ids + row) >= 0) | (tl.load(states + row) != FINITE):
        return
    if is_filtered(hot, nucleus, k, least, vocab) == 0:
        return
    lane = tl.arange(0, SHORT * 128)
    block = tl.load(short + place * SHORT + lane // BLOCK)
    ids = block * BLOCK + lane % BLOCK
    x = changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED)
    values = tl.load(x + ids, (block >= 0) & (ids < vocab), float("-inf"))
    peak, scale = tl.load(peaks + place), inverse(hot)
    value = tl.load(short_end + 2 * place).to(tl.float32, bitcast=True)
    lowest = lowest_kept(peak, hot, least)
    kept = is_before(values, ids, value, tl.load(short_end + 2 * place + 1)) & (values >= lowest)
    count = tl.sum(kept.to(tl.int32))
    whole = (value == float("-inf")) | (lowest > value)
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
            total = tl.load(totals + place) * _UNIT
            enough = (limited == 0) & (least == 0)
        wanted = tl.maximum(units_up_to(nucleus, total), 1)
        enough = enough & (mass >= wanted)
        if enough:
            kept = first_k(kept & (units > 0), values, units, wanted)
    if enough:
        tl.store(tokens + row, _drawn_from(kept, values, ids, peak, hot, scale, keys + 2 * row))
    else:
        tl.store(pending + place, 1)


@triton.jit
def _drawn_from(kept, values, ids, peak, temperature, scale, keys):
    """The id of the largest `(x - peak) / temperature + noise`, the first among equals."""
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
