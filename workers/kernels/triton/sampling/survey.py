"""One pass over all logits: what of each block of 128 ids decides whether it matters; and the noise and order it uses.

The noise is that of `workers/sampling/noise.py`. Scores in float32 are screens: they tell which few ids can win. Only
those are scored in float64. Searches for thresholds in the order of logits, as whole numbers, take the same steps on
every device.
"""

import triton
import triton.language as tl

# Scores in float32, of scaled logits that end at 0, differ by less from those in float64 where it matters: their noise
# by 3e-5, and a winner lies at most 26 below 0, where it is rounded to 2e-6.
MARGIN = tl.constexpr(1e-3)


@triton.jit
def noise_words(ids, key, factor):
    """Words of 32 bits, of `ids` and the two words of their row's key (int32): uint32, in the order of the noise."""
    word = ids.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    word = word ^ (word >> 16)
    word = (word ^ key.to(tl.uint32, bitcast=True)) * factor.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ 0x80000000  # words are compared as signed numbers


@triton.jit
def gumbel_screen(words):
    """Gumbel noise in float32. Near 1 the logarithm of a number is that of its distance from 1, which is exact."""
    distance = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = distance * (1.0 + distance * (0.5 + distance * (0.3333333333 + distance * 0.25)))
    large = -tl.log((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    return -tl.log(tl.where(distance < 0.015625, small, large))


@triton.jit
def gumbel(word):
    """Gumbel noise in float64."""
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def inverse(temperature):
    """1 / temperature in float32, not above its largest number."""
    return tl.minimum(1.0 / temperature.to(tl.float64), 3.4028234663852886e38).to(tl.float32)


@triton.jit
def margin_at(peak, temperature):
    """Largest distance below the best screen of an id that can win by `peak / temperature + noise` in float64, the
    rounding of that sum included."""
    return 2 * MARGIN + (tl.abs(peak.to(tl.float64)) / temperature.to(tl.float64) * 1e-15).to(tl.float32)


BLOCK = tl.constexpr(128)


@triton.jit
def changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED: tl.constexpr):
    """The row's logits as they are sampled: `adjusted` where bias, penalties or a mask changed them."""
    x = logits + place.to(tl.int64) * stride
    if PROCESSED:
        is_changed = tl.load(changed + row) > 0
        if is_changed:
            x = adjusted + place.to(tl.int64) * vocab
    return x


@triton.jit
def survey(
    logits,  # float32 [L, V], rows `stride` elements apart
    adjusted,  # float32 [L, V]; of rows that are changed
    maxima,  # float32 [L, B]   largest logit; +inf where one is NaN
    screens,  # float32 [L, B]   largest (logit - maximum) / temperature + noise; of rows that are drawn
    masses,  # float32 [L, B]   sum of exp((logit - maximum) / temperature); of those too
    changed,
    temperature,
    keys,
    first,
    stride,
    vocab,
    blocks,
    TILE: tl.constexpr,  # blocks for one program
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    place, tile = tl.program_id(0), tl.program_id(1)
    row = first + place
    block = tile * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED)
    x = tl.load(x + ids, ids < vocab, float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 1)
    into = place * blocks + block
    inside = block < blocks
    tl.store(maxima + into, top, inside)
    if RANDOM:
        hot = tl.load(temperature + row)
        if hot > 0:
            finite = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            scaled = (x - finite[:, None]) * inverse(hot)
            words = noise_words(ids, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
            tl.store(screens + into, tl.max(scaled + gumbel_screen(words), 1), inside)
            if FILTERED:
                tl.store(masses + into, tl.sum(tl.exp(scaled), 1), inside)


@triton.jit
def ordered(x):
    """float32 as int32 whose order is the same; no NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding zero turns -0 into 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 of `ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rounded_up(value):
    """The smallest float32 that is not below a float64."""
    near = value.to(tl.float32)
    above = value_of(ordered(near) + 1)
    return tl.where(near.to(tl.float64) < value, above, near)


@triton.jit
def lowest_kept(peak, temperature, min_p):
    """The smallest float32 that min-p keeps, from the largest; -inf where min-p is off."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if min_p > 0:
        lowest = rounded_up(peak.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64)))
    return lowest


@triton.jit
def middle_of(low, high):
    """The middle of two int32, computed in int64, since their distance may not fit into an int32."""
    return ((low.to(tl.int64) + high) >> 1).to(tl.int32)


@triton.jit
def threshold(values, weights, wanted):
    """The largest float32 from which on `weights`, whole numbers, have a sum of `wanted`; all have at least that.

    Not one of `values` itself where those from it on have that sum exactly.
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
    """The lowest of `numbers` with a flag; 2^31 - 1 where there is none."""
    return tl.min(tl.where(flags, numbers, 0x7FFFFFFF))
