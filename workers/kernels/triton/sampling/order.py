"""The order of logits as whole numbers, and searches for thresholds in it that take the same steps on every device."""

import triton
import triton.language as tl


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
