"""Memory of this process by the kernel's count: its size, a limit for it, and its return to the system.

Only Linux counts and limits it. Elsewhere every size is 0, and limits have no effect.
"""

import ctypes
import resource
import sys
from pathlib import Path
from typing import NamedTuple

_IS_LINUX = sys.platform == "linux"
_STATM = Path("/proc/self/statm")


class MemoryUse(NamedTuple):
    """Bytes of the address space that are mapped, that are resident, and that are resident pages of files."""

    mapped: int
    resident: int
    of_files: int


def memory_use() -> MemoryUse:
    """Return the memory of this process."""
    if not _IS_LINUX:
        return MemoryUse(0, 0, 0)
    mapped, resident, of_files, *_ = map(int, _STATM.read_text("ascii").split())
    page = resource.getpagesize()
    return MemoryUse(mapped * page, resident * page, of_files * page)


def limit_mapped_bytes(most: int) -> None:
    """Let this process map at most `most` bytes, or less if the hard limit is lower."""
    if _IS_LINUX:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _IS_LINUX else None
CAN_TRIM = _malloc_trim is not None  # whether the C library is glibc


def trim() -> None:
    """Return free memory of the heap to the system, if the C library can."""
    if _malloc_trim is not None:
        _malloc_trim(0)
