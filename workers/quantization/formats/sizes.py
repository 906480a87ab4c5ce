"""Memory of weights that are multiplied in whole numbers or float8, in bytes. Torch-free."""

from oarlock.workers.quantization.groups import MOST_AT_ONCE, packed_bytes


def whole_number_bytes(rows: int, inputs: int, bits: int, group: int | None, *, offsets: bool) -> int:
    """Bytes of a weight [rows, inputs] of `GroupedLinearMethod`. `group`: inputs that share a scale; None: all."""
    if bits == 8 and group is None and not offsets:
        return rows * (inputs + 8)  # a scale, and the sum that the kernel begins with
    return packed_bytes(rows, inputs, bits, group or -(-inputs // 16) * 16, offsets=offsets)


def fp8_bytes(rows: int, inputs: int, group: int) -> int:
    """Bytes of an `Fp8Weight` [rows, inputs]: a scale in float32 for each group, or each piece of a longer one."""
    pieces = sum(-(-min(group, inputs - start) // MOST_AT_ONCE) for start in range(0, inputs, group))
    return rows * (inputs + 4 * pieces)
