"""Groups of a weight's inputs that share a scale, for products that are cut into slices, and the memory they take.

Torch-free, so that memory can be counted before any rank starts.
"""

import math

_LEAST = 16  # inputs of a group, in products
# Inputs that products with weights in e4m3 add up before they multiply by a scale: `kMostAtOnce` in csrc/gemm/fp8.cpp.
MOST_AT_ONCE = 128


def kernel_group(group: int) -> int:
    """Inputs that products with grouped weights add up before they multiply by a scale: 32, or 16 where it must be."""
    return 32 if group % 32 == 0 else 16


def packed_bytes(rows: int, inputs: int, bits: int, group: int, *, offsets: bool) -> int:
    """Bytes of a `GroupedWeight` [rows, inputs] in memory: numbers, 16 bits for a scale, as many for an offset."""
    unit = kernel_group(group)
    return rows * (-(-inputs // unit) * (unit * bits // 8 + 2 * (1 + offsets)) + 4)  # and a factor for each output


def group_in_slices(inputs: int, group: int, slices: int) -> int:
    """Number of inputs that share a scale, if groups begin anew at each of `slices` equal parts of `inputs`.

    The greatest common divisor, so that a rank that holds some of the slices, and may begin within a stored group, cuts
    its inputs as a rank that holds them all.
    """
    return group if slices == 1 else math.gcd(group, inputs // slices)


def group_of_blocks(group: int, inputs: int, slices: int) -> int | None:
    """Counts the inputs of a GGUF weight that have one scale, where blocks begin anew at each of `slices` equal parts
    of a rank's `inputs`, so that the bits are the same at every number of ranks. None: fewer than products take, so
    that the weight is dequantised; no model that is known has a rank's border there."""
    found = math.gcd(group, inputs // slices)
    return found if found % _LEAST == 0 else None


def pieces_of(inputs: int, group: int, slices: int, most: int) -> list[list[tuple[int, int]]]:
    """Pieces of each slice whose inputs are added up at a time: [start, stop) within a group, at most `most` inputs."""
    length = inputs // slices
    assert slices * length == inputs, f"{inputs} inputs cannot be cut into {slices} slices"
    group = group_in_slices(inputs, group, slices)
    found = []
    for first in range(0, inputs, length):
        runs = [(start, min(start + group, first + length)) for start in range(first, first + length, group)]
        found.append([(at, min(at + most, stop)) for start, stop in runs for at in range(start, stop, most)])
    return found


def whole_number_bytes(rows: int, inputs: int, bits: int, group: int | None, *, offsets: bool) -> int:
    """Bytes of a weight [rows, inputs] of `GroupedLinearMethod`. `group`: inputs that share a scale; None: all."""
    if bits == 8 and group is None and not offsets:
        return rows * (inputs + 8)  # a scale, and the sum that the kernel begins with
    return packed_bytes(rows, inputs, bits, group or -(-inputs // 16) * 16, offsets=offsets)


def fp8_bytes(rows: int, inputs: int, group: int) -> int:
    """Bytes of an `Fp8Weight` [rows, inputs]: a scale in float32 for each group, or each piece of a longer one."""
    pieces = sum(-(-min(group, inputs - start) // MOST_AT_ONCE) for start in range(0, inputs, group))
    return rows * (inputs + 4 * pieces)
