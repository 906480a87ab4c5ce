"""One pass over all logits, and the results for each row: its state, and its token or the blocks to read.

For each block of 128 ids, the survey computes the values that decide if the block matters. With them, `choose` takes
the token of rows without filters. For other rows, it lists the blocks that hold the kept ids.

The noise is the same as in `workers/sampling/noise.py`. float32 scores are screens, which show the few ids that can
win. Only these are scored in float64. Searches for thresholds compare logits as integers and take the same steps on
every device.
"""

import triton
import triton.language as tl

# Bound of the difference between float32 and float64 scores of scaled logits that end at 0, for possible winners. Their
# noise differs by 3e-5, and a winner is at most 26 below 0, where float32 rounds to 2e-6.
MARGIN = tl.constexpr(1e-3)


@triton.jit
def noise_words(ids, key, factor):
    """Return uint32 words, in the order of the noise, of `ids` and the two words (int32) of their row's key."""
    word = ids.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = word ^ (word >> 16)
    word = (word ^ key.to(tl.uint32, bitcast=True)) * factor.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ 0x80000000  # words are compared as signed integers


@triton.jit
def gumbel_screen(words):
    """Return Gumbel noise in float32. Near 1, the logarithm is computed from the distance to 1, which is exact."""
    distance = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = distance * (1.0 + distance * (0.5 + distance * (0.3333333333 + distance * 0.25)))
    large = -tl.log((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    return -tl.log(tl.where(distance < 0.015625, small, large))


@triton.jit
def gumbel(word):
    """Return Gumbel noise in float64."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def inverse(temperature):
    """Return 1 / temperature in float32, limited to the largest float32."""
    return tl.minimum(1.0 / temperature.to(tl.float64), 3.4028234663852886e38).to(tl.float32)


@triton.jit
def margin_at(peak, temperature):
    """Return how far an id's screen may be below the best screen if the id can still win.

    It wins with `peak / temperature + noise` in float64. The margin includes the rounding of that sum.
    """
    return 2 * MARGIN + (tl.abs(peak.to(tl.float64)) / temperature.to(tl.float64) * 1e-15).to(tl.float32)


BLOCK = tl.constexpr(128)


@triton.jit
def changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED: tl.constexpr):
    """Return the row's logits for sampling: `adjusted` if bias, penalties or a mask changed them."""
    x = logits + index.to(tl.int64) * stride
    if PROCESSED:
        is_changed = tl.load(changed + row) > 0
        if is_changed:
            x = adjusted + index.to(tl.int64) * vocab
    return x


@triton.jit
def survey(
    logits,  # float32 [L, V], rows `stride` elements apart
    adjusted,  # float32 [L, V]; for changed rows
    maxima,  # float32 [L, B]   largest logit; +inf if any is NaN
    screens,  # float32 [L, B]   largest (logit - maximum) / temperature + noise; for rows that are drawn
    masses,  # float32 [L, B]   sum of exp((logit - maximum) / temperature); also for rows that are drawn
    changed,
    temperature,
    keys,
    first,
    first_id,  # the id of the first logit if the vocabulary is split over ranks; else 0
    stride,
    vocab,
    blocks,
    TILE: tl.constexpr,  # blocks of one program
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    index, tile = tl.program_id(0), tl.program_id(1)
    row = first + index
    block = tile * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED)
    x = tl.load(x + ids, ids < vocab, float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN differs from itself
    top = tl.max(x, 1)
    into = index * blocks + block
    inside = block < blocks
    tl.store(maxima + into, top, inside)
    if RANDOM:
        hot = tl.load(temperature + row)
        if hot > 0:
            finite = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            scaled = (x - finite[:, None]) * inverse(hot)
            words = noise_words(first_id + ids, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
            tl.store(screens + into, tl.max(scaled + gumbel_screen(words), 1), inside)
            if FILTERED:
                tl.store(masses + into, tl.sum(tl.exp(scaled), 1), inside)


@triton.jit
def ordered(x):
    """Map float32 to int32 with the same order. `x` must not be NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding zero turns -0 into 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """Return the float32 of an `ordered` value."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up(value):
    """Return the smallest float32 that is not below a float64."""
    near = value.to(tl.float32)
    above = value_of(ordered(near) + 1)
    return tl.where(near.to(tl.float64) < value, above, near)


SLICES = tl.constexpr(8)  # slices of a vocabulary: VOCAB_SLICES of workers/distributed/topology.py


@triton.jit
def _folded(lanes):
    """Sum 128 lanes by halves: a sum of two has only one order."""
    lanes = tl.sum(tl.reshape(lanes, [2, 64]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 32]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 16]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 8]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 4]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 2]), 0)
    return tl.sum(lanes, 0)


@triton.jit
def spread(
    logits,
    adjusted,
    spreads,  # float64 [L, SLICES, 3]   count, sum and sum of squares of the logits that are not -inf
    changed,
    top_n_sigma,
    first,
    stride,
    vocab,
    PROCESSED: tl.constexpr,
):
    """Write the spreads of rows with top-n-sigma, added up like `slice_spread` of csrc/sampling/sample_row.h."""
    index, part = tl.program_id(0), tl.program_id(1)
    row = first + index
    if tl.load(top_n_sigma + row) <= 0:
        return
    x = changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED)
    lane = tl.arange(0, BLOCK)
    length = tl.cdiv(vocab, SLICES)
    begin, end = part * length, tl.minimum((part + 1) * length, vocab)
    count = tl.zeros([BLOCK], tl.int32)
    total, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        value = tl.load(x + start + lane, start + lane < end, float("-inf"))
        counts = value > float("-inf")
        value = tl.where(counts, value, 0.0).to(tl.float64)
        count += counts.to(tl.int32)
        total += value
        squares += value * value
    into = spreads + (index * SLICES + part) * 3
    tl.store(into, tl.sum(count).to(tl.float64))
    tl.store(into + 1, _folded(total))
    tl.store(into + 2, _folded(squares))


@triton.jit
def floor_of(peak, temperature, min_p, top_n_sigma, spreads):
    """Return the smallest float32 that a row keeps, computed from its largest; -inf if no floor is set."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if min_p > 0:
        lowest = rounded_up(peak.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64)))
    if top_n_sigma > 0:
        count, total, squares = tl.load(spreads), tl.load(spreads + 1), tl.load(spreads + 2)
        for part in range(1, SLICES):
            count += tl.load(spreads + 3 * part)
            total += tl.load(spreads + 3 * part + 1)
            squares += tl.load(spreads + 3 * part + 2)
        mean = total / count
        deviation = tl.sqrt(tl.maximum(squares / count - mean * mean, 0.0))
        lowest = tl.maximum(lowest, rounded_up(peak.to(tl.float64) - top_n_sigma.to(tl.float64) * deviation))
    return lowest


@triton.jit
def middle_of(low, high):
    """Return the middle of two int32, computed in int64, because their distance may overflow an int32."""
    return ((low.to(tl.int64) + high) >> 1).to(tl.int32)


@triton.jit
def threshold(values, weights, wanted):
    """Return the largest float32 from which on integer `weights` sum up to at least `wanted`; all together do.

    If the sum is exactly `wanted`, the result may be between two of `values`.
    """
    low, high = ordered(tl.min(values)), ordered(tl.max(values)) + 1
    while low < high - 1:
        middle = middle_of(low, high)
        found = tl.sum(tl.where(values >= value_of(middle), weights, 0).to(tl.int64))
        if found >= wanted:
            low = middle
            if found == wanted:
                high = middle + 1
        else:
            high = middle
    return value_of(low)


@triton.jit
def first_of(flags, numbers):
    """Return the lowest of `numbers` with a flag; 2^31 - 1 if there is none."""
    return tl.min(tl.where(flags, numbers, 0x7FFFFFFF))


# Values of `protocol.StepOutput.finite`.
NONFINITE, FINITE, ALL_BANNED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def is_filtered(temperature, top_p, top_k, floored, vocab):
    """Return whether a filter removes tokens from a sampled row."""
    return (temperature > 0) & (top_k != 1) & ((top_p < 1) | floored | ((top_k > 0) & (top_k < vocab)))


@triton.jit
def choose(
    logits,
    adjusted,
    maxima,
    screens,
    masses,
    allowed,  # int32 [L, tiles]   number of ids that each tile's mask allows; for changed rows
    banned,  # int32 [L]   number of these ids that a bias bans
    listed,  # int32 [L, B]   ascending, for filtered rows: all blocks that may hold kept ids
    num_listed,  # int32 [L]
    short,  # int32 [L, SHORT]   ascending; -1 after the end: the blocks that hold the largest logits,
    short_end,  # int32 [L, 2]   which come before this pair: the bits of a float32, and an id
    totals,  # float64 [L]   sum of exp((x - peak) / temperature)
    peaks,  # float32 [L]
    floors,  # float32 [L]   for filtered rows: the smallest logit that is kept
    tokens,  # int32 [R]
    states,  # int32 [R]
    changed,
    target_ids,
    temperature,
    top_p,
    top_k,
    min_p,
    top_n_sigma,
    spreads,
    keys,
    first,
    stride,
    vocab,
    blocks,
    tiles,
    WIDTH: tl.constexpr,  # B rounded up to a power of 2
    TILES: tl.constexpr,  # `tiles` rounded up to a power of 2
    SHORT: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    index, block = tl.program_id(0), tl.arange(0, WIDTH)
    row, at_row, inside = first + index, index * blocks, block < blocks
    top = tl.load(maxima + at_row + block, inside, float("-inf"))
    peak = tl.max(top)
    state = _state(peak, allowed + index * tiles, banned + index, changed + row, tiles, TILES, PROCESSED)
    tl.store(states + row, state)
    tl.store(peaks + index, peak)
    target = tl.load(target_ids + row)
    token = tl.maximum(target, 0)
    if (target < 0) & (state == FINITE):
        x = changed_row(logits, adjusted, changed, row, index, stride, vocab, PROCESSED)
        hot, k = tl.load(temperature + row), tl.load(top_k + row)
        if (hot == 0) | (k == 1):
            token = largest(x, top, peak, block, vocab)
        elif RANDOM:
            screen = tl.load(screens + at_row + block, inside, float("-inf"))
            filtered = False
            if FILTERED:
                nucleus, least, sigmas = tl.load(top_p + row), tl.load(min_p + row), tl.load(top_n_sigma + row)
                filtered = is_filtered(hot, nucleus, k, (least > 0) | (sigmas > 0), vocab)
                if filtered:
                    mass = tl.load(masses + at_row + block, inside, 0.0)
                    _store_total(totals + index, mass, top, peak, hot)
                    floor = floor_of(peak, hot, least, sigmas, spreads + index * SLICES * 3)
                    tl.store(floors + index, floor)
                    _list_all(listed + at_row, num_listed + index, top, block, k, floor)
                    _list_few(short + index * SHORT, short_end + 2 * index, top, block, vocab, SHORT)
            if not filtered:
                tl.store(floors + index, float("-inf"))
                token, _ = drawn(x, top, peak, screen, block, hot, keys + 2 * row, 0, vocab)
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
def largest(x, top, peak, block, vocab):
    """Return the lowest id among the largest logits."""
    start = first_of(top == peak, block) * BLOCK
    lane = tl.arange(0, BLOCK)
    values = tl.load(x + start + lane, start + lane < vocab, float("-inf"))
    return start + first_of(values == peak, lane)


@triton.jit
def drawn(x, top, peak, screen, block, temperature, keys, first_id, vocab):
    """Return the id with the largest `x / temperature + noise`, the lowest among equals, and the sum."""
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
        words = noise_words(first_id + ids, key, factor)
        close = ((values - peak) * scale + gumbel_screen(words) >= least) & (values > float("-inf"))
        for _ in range(tl.sum(close.to(tl.int32))):
            ident = first_of(close, ids)
            close &= ids != ident
            value = tl.load(x + ident)
            noise = gumbel(noise_words(first_id + ident, key, factor))
            score = value.to(tl.float64) / temperature.to(tl.float64) + noise
            if score > best:
                best = score
                token = ident
    return token, best


@triton.jit
def _store_total(total, mass, top, peak, temperature):
    mass *= tl.exp((top - peak) * inverse(temperature))
    tl.store(total, tl.sum(mass.to(tl.float64)))


@triton.jit
def _list_all(listed, num_listed, top, block, top_k, least):
    """List the blocks that floor and top-k may keep. The k-th largest logit is at least the k-th block maximum."""
    finite = top > float("-inf")
    if (top_k > 0) & (top_k <= tl.sum(finite.to(tl.int32))):
        least = tl.maximum(least, threshold(top, finite.to(tl.int32), top_k))
    wanted = finite & (top >= least)
    count = wanted.to(tl.int32)
    tl.store(listed + tl.cumsum(count) - 1, block, wanted)
    tl.store(num_listed, tl.sum(count))


@triton.jit
def _list_few(short, end, top, block, vocab, SHORT: tl.constexpr):
    """List the SHORT blocks with the largest maxima, the lowest among equals."""
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
