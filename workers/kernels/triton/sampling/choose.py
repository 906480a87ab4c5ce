"""Chooses each row's state from the survey of blocks, and its token where no filter is on, else the blocks to read."""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.survey import (
    BLOCK,
    changed_row,
    first_of,
    gumbel,
    gumbel_screen,
    inverse,
    lowest_kept,
    margin_at,
    noise_words,
    threshold,
)

NONFINITE, FINITE, ALL_BANNED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of `protocol.StepOutput.finite`


@triton.jit
def is_filtered(temperature, top_p, top_k, min_p, vocab):
    """Whether a filter removes tokens from a row that samples."""
    return (temperature > 0) & (top_k != 1) & ((top_p < 1) | (min_p > 0) | ((top_k > 0) & (top_k < vocab)))


@triton.jit
def choose(
    logits,
    adjusted,
    maxima,
    screens,
    masses,
    allowed,  # int32 [L, tiles]   ids that each tile's mask allows; of changed rows
    banned,  # int32 [L]   how many of those a bias bans
    listed,  # int32 [L, B]   ascending, of filtered rows: all blocks that may hold what is kept
    num_listed,  # int32 [L]
    short,  # int32 [L, SHORT]   ascending; -1 beyond: the blocks that hold the largest logits,
    short_end,  # int32 [L, 2]   which are those before this pair: the bits of a float32, and an id
    totals,  # float64 [L]   sum of exp((x - peak) / temperature)
    peaks,  # float32 [L]
    tokens,  # int32 [R]
    states,  # int32 [R]
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
    blocks,
    tiles,
    WIDTH: tl.constexpr,  # the power of 2 from B on
    TILES: tl.constexpr,  # the power of 2 from `tiles` on
    SHORT: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    place = tl.program_id(0)
    row = first + place
    block = tl.arange(0, WIDTH)
    inside = block < blocks
    at_row = place * blocks
    top = tl.load(maxima + at_row + block, inside, float("-inf"))
    peak = tl.max(top)
    state = _state(peak, allowed + place * tiles, banned + place, changed + row, tiles, TILES, PROCESSED)
    tl.store(states + row, state)
    tl.store(peaks + place, peak)
    token = tl.load(target_ids + row)
    if token < 0:
        token = 0
        if state == FINITE:
            x = changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED)
            hot, k = tl.load(temperature + row), tl.load(top_k + row)
            if (hot == 0) | (k == 1):
                token = _largest(x, top, peak, block, vocab)
            elif RANDOM:
                screen = tl.load(screens + at_row + block, inside, float("-inf"))
                filtered = False
                if FILTERED:
                    nucleus, least = tl.load(top_p + row), tl.load(min_p + row)
                    filtered = is_filtered(hot, nucleus, k, least, vocab)
                    if filtered:
                        mass = tl.load(masses + at_row + block, inside, 0.0)
                        mass *= tl.exp((top - peak) * inverse(hot))
                        tl.store(totals + place, tl.sum(mass.to(tl.float64)))
                        _list_all(listed + at_row, num_listed + place, top, block, peak, hot, k, least)
                        _list_few(short + place * SHORT, short_end + 2 * place, top, block, vocab, SHORT)
                if not filtered:
                    token = _drawn(x, top, peak, screen, block, hot, keys + 2 * row, vocab)
    tl.store(tokens + row, token)


@triton.jit
def _state(peak, allowed, banned, changed, tiles, TILES: tl.constexpr, PROCESSED: tl.constexpr):
    state = NONFINITE
    if (peak > float("-inf")) & (peak < float("inf")):
        state = FINITE
    if PROCESSED:
        nothing = (peak == float("-inf")) & (tl.load(changed) > 0)
        if nothing:
            tile = tl.arange(0, TILES)
            free = tl.sum(tl.load(allowed + tile, tile < tiles, 0))
            state = tl.where(free == tl.load(banned), ALL_BANNED, NONFINITE)
    return state


@triton.jit
def _largest(x, top, peak, block, vocab):
    """The lowest id among the largest logits."""
    start = first_of(top == peak, block) * BLOCK
    lane = tl.arange(0, BLOCK)
    values = tl.load(x + start + lane, start + lane < vocab, float("-inf"))
    return start + first_of(values == peak, lane)


@triton.jit
def _drawn(x, top, peak, screen, block, temperature, keys, vocab):
    """The id of the largest `x / temperature + noise`, the lowest among equals."""
    scale = inverse(temperature)
    bound = tl.where(top > float("-inf"), (top - peak) * scale + screen, float("-inf"))
    least = tl.max(bound) - margin_at(peak, temperature)
    near = (bound >= least) & (top > float("-inf"))
    key, factor = tl.load(keys), tl.load(keys + 1)
    lane = tl.arange(0, BLOCK)
    best, token = tl.full([], float("-inf"), tl.float64), 0
    for _ in range(tl.sum(near.to(tl.int32))):
        this = first_of(near, block)
        near &= block != this
        ids = this * BLOCK + lane
        values = tl.load(x + ids, ids < vocab, float("-inf"))
        words = noise_words(ids, key, factor)
        close = ((values - peak) * scale + gumbel_screen(words) >= least) & (values > float("-inf"))
        for _ in range(tl.sum(close.to(tl.int32))):
            ident = first_of(close, ids)
            close &= ids != ident
            value = tl.load(x + ident)
            score = value.to(tl.float64) / temperature.to(tl.float64) + gumbel(noise_words(ident, key, factor))
            if score > best:
                best = score
                token = ident
    return token


@triton.jit
def _list_all(listed, num_listed, top, block, peak, temperature, top_k, min_p):
    """The blocks with a logit that min-p and top-k may keep: the k-th largest logit is at least the k-th maximum."""
    least = lowest_kept(peak, temperature, min_p)
    finite = top > float("-inf")
    if (top_k > 0) & (top_k <= tl.sum(finite.to(tl.int32))):
        least = tl.maximum(least, threshold(top, finite.to(tl.int32), top_k))
    wanted = finite & (top >= least)
    count = wanted.to(tl.int32)
    tl.store(listed + tl.cumsum(count) - 1, block, wanted)
    tl.store(num_listed, tl.sum(count))


@triton.jit
def _list_few(short, end, top, block, vocab, SHORT: tl.constexpr):
    """The SHORT blocks with the largest maxima, the lowest among equals."""
    finite = top > float("-inf")
    wanted = finite
    value, ident = tl.full([], float("-inf"), tl.float32), 0
    if tl.sum(finite.to(tl.int32)) > SHORT:
        value = threshold(top, finite.to(tl.int32), SHORT)
        above, equal = top > value, top == value
        room = SHORT - tl.sum(above.to(tl.int32))
        wanted = above | (equal & (tl.cumsum(equal.to(tl.int32)) <= room))
        ident = tl.minimum(first_of(equal & (wanted == 0), block), vocab // BLOCK + 1) * BLOCK
    count = wanted.to(tl.int32)
    slot = tl.arange(0, SHORT)
    tl.store(short + slot, -1, slot >= tl.sum(count))
    tl.store(short + tl.cumsum(count) - 1, block, wanted)
    tl.store(end, value.to(tl.int32, bitcast=True))
    tl.store(end + 1, ident)
