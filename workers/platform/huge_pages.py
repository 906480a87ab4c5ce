"""Memory in huge pages (2 MiB on x86): a tenth of the page faults, and far fewer misses of the address cache.

Only advice: where the system has none, or the operator switched them off, the same memory comes in ordinary pages. It
is allocated in fresh pages, which read as zero and take no memory until they are first touched; a page then comes from
the NUMA node of the thread that touches it.
"""

import ctypes
import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("oarlock.platform")

HUGE_PAGE_BYTES = 2 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_page_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor, zero until written, aligned to 2 MiB if it takes at least so much.

    Freed with its last reference, as any tensor. Raises `MemoryError` when there is no address space for it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory, start = _fresh_pages(size)
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start).view(*shape)


class StagingMemory:
    """Memory for tensors that live briefly one after the other, such as weights between reading and packing.

    The pages of a tensor that is gone serve the next one, which saves the system from clearing them again. At most one
    block is kept for that. Tensors may also stay: then each has pages of its own.
    """

    def __init__(self) -> None:
        self._free: tuple[mmap.mmap, int, int] | None = None  # memory, start and size in bytes
        self._keeps = True

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous CPU tensor. Raises `MemoryError`."""
        size = math.prod(shape) * dtype.itemsize
        if size < HUGE_PAGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block, self._free = self._free, None
        if block is None or block[2] < size:
            del block  # before the larger one is there
            block = (*_fresh_pages(size), size)
        memory, start, _ = block
        view = (ctypes.c_char * size).from_buffer(memory, start)  # lives as long as the tensor's storage
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(*shape)

    def release(self) -> None:
        """Keep no block from now on."""
        self._free = None
        self._keeps = False

    def _give_back(self, block: tuple[mmap.mmap, int, int]) -> None:
        if self._keeps and (self._free is None or self._free[2] < block[2]):
            self._free = block


def _fresh_pages(size: int) -> tuple[mmap.mmap, int]:
    """At least `size` bytes from the returned offset, which is aligned to 2 MiB in memory."""
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory: {error.strerror}") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    reason = why_not()
    if reason is None:
        try:
            # Not for the end, which does not fill a huge page: that would take up to 2 MiB more than `size`.
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        except OSError as error:
            reason = f"the system refuses the advice: {error.strerror}"
    _log_once(reason)
    return memory, start


def why_not(setting: Path = _SETTING) -> str | None:
    """None if huge pages can be advised here; else the reason in one phrase."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "the system has no such advice"
    try:
        text = setting.read_text()
    except OSError:
        return "the kernel was built without them"
    if "[never]" in text:
        return f"{setting} says never"
    return None


@cache
def _log_once(reason: str | None) -> None:
    if reason is None:
        logger.info("event=huge_pages advised=true")
    else:
        logger.info('event=huge_pages advised=false reason="%s"', reason)
