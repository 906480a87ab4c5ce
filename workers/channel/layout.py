"""Where things lie in the shared memory of collectives. Torch-free: the process that creates it does not load torch."""

import mmap

LINE = 64  # bytes of a cache line; each flag has one of its own


def data_offset(size: int) -> int:
    """Start of the input buffers, after one flag per rank."""
    return (size * LINE + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE


def total_bytes(size: int, buffer_bytes: int) -> int:
    """Shared memory that a group of `size` ranks needs: flags and two input buffers per rank."""
    return data_offset(size) + 2 * size * buffer_bytes
