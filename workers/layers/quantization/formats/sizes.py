"""What weights that are multiplied in whole numbers or float8 take in memory. Torch-free."""


def grouped_bytes(rows: int, inputs: int, bits: int, group: int, *, offsets: bool) -> int:
    """Of a `GroupedWeight` [rows, inputs]."""
    groups = -(-inputs // group)
    return rows * (-(-inputs * bits // 8) + groups * 4 * (1 + offsets))


def fp8_bytes(rows: int, inputs: int, group: int) -> int:
    """Of an `Fp8Weight` [rows, inputs]."""
    return rows * (inputs + -(-inputs // group) * 4)
