"""Groups of a weight's inputs that share a scale, for matmuls that are cut into slices, and the memory they take.

Torch-free, so that memory can be counted before any rank starts.
"""

import math

_LEAST = 16  # minimum inputs of a group in matmuls
# Maximum inputs that matmuls with e4m3 weights add up before multiplying by a scale: `kMostAtOnce` in
# csrc/gemm/fp8.cpp.
MOST_AT_ONCE = 128


def kernel_group(group: int) -> int:
    """Return the inputs that grouped matmuls add up before multiplying by a scale: 32 if they divide `group`, else
    16."""
    return 32 if group % 32 == 0 else 16


def packed_bytes(rows: int, inputs: int, bits: int, group: int, *, offsets: bool) -> int:
    """Return the bytes of a `GroupedWeight` [rows, inputs] in memory: values, and 16 bits each for a scale and an
    offset."""
    unit = kernel_group(group)
    return rows * (-(-inputs // unit) * (unit * bits // 8 + 2 * (1 + offsets)) + 4)  # includes a factor for each output


def group_in_slices(inputs: int, group: int, slices: int) -> int:
    """Return the number of inputs that share a scale, if groups start anew at each of `slices` equal parts of `inputs`.

    It is the greatest common divisor, so that a rank that holds some of the slices, and may begin within a stored
    group, cuts its inputs like a rank that holds all slices.
    """
    return group if slices == 1 else math.gcd(group, inputs // slices)


def group_of_blocks(group: int, inputs: int, slices: int) -> int | None:
    """Return the inputs that share a scale in a GGUF weight whose blocks start anew at each of `slices` parts of
    `inputs`.

    `inputs` are the inputs of a rank, in equal parts, so that the bits do not depend on the number of ranks. Return
    None if the group is too small for matmuls: the weight is then dequantised. No known model has a rank's border
    there.
    """
    found = math.gcd(group, inputs // slices)
    return found if found % _LEAST == 0 else None


def pieces_of(inputs: int, group: int, slices: int, most: int) -> list[list[tuple[int, int]]]:
    """Return the pieces of each slice whose inputs are added up at a time.

    Each piece [start, stop) is within a group and has at most `most` inputs.
    """
    length = inputs // slices
    assert slices * length == inputs, f"{inputs} inputs cannot be cut into {slices} slices"
    group = group_in_slices(inputs, group, slices)
    found = []
    for first in range(0, inputs, length):
        runs = [(start, min(start + group, first + length)) for start in range(first, first + length, group)]
        found.append([(at, min(at + most, stop)) for start, stop in runs for at in range(start, stop, most)])
    return found


def integer_bytes(rows: int, inputs: int, bits: int, group: int | None, *, offsets: bool) -> int:
    """Return the bytes of a `GroupedLinearMethod` weight [rows, inputs]. `group`: inputs that share a scale; None:
    all."""
    if bits == 8 and group is None and not offsets:
        return rows * (inputs + 8)  # a scale, and the sum that the kernel begins with
    return packed_bytes(rows, inputs, bits, group or -(-inputs // 16) * 16, offsets=offsets)


def fp8_bytes(rows: int, inputs: int, group: int) -> int:
    """Return the bytes of an `Fp8Weight` [rows, inputs] with a float32 scale for each group, or piece of a longer
    group."""
    pieces = sum(-(-min(group, inputs - start) // MOST_AT_ONCE) for start in range(0, inputs, group))
    return rows * (inputs + 4 * pieces)
