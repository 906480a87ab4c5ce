"""The noise of `workers/sampling/noise.py`: its words, and Gumbel noise from them in float32 and float64.

Scores in float32 are screens: they tell which few ids can win. Only those are scored in float64.
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
