"""Memory in huge pages (2 MiB on x86), which causes far fewer page faults and TLB misses.

Huge pages are only advice: if the system has none, or the operator has switched them off, the same memory comes in
ordinary pages. Memory is allocated in fresh pages, which read as zero and take no memory until they are first touched.
A page then comes from the NUMA node of the thread that touches it.
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
    """Return a contiguous CPU tensor, zero until written, aligned to 2 MiB if it takes at least 2 MiB.

    It is freed with its last reference, as any tensor. Raises `MemoryError` if there is no address space for it.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory, start = _fresh_pages(size)
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start).view(*shape)


class StagingMemory:
    """Memory for tensors that live briefly one after the other, such as weights between reading and packing.

    The next tensor reuses the pages of a freed one, so the system need not clear them again. At most one block is kept
    for that. If a tensor stays alive, the next one gets its own pages.
    """

    def __init__(self) -> None:
        self._free: tuple[mmap.mmap, int, int] | None = None  # memory, start and size in bytes
        self._keeps = True

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous CPU tensor. Raises `MemoryError`."""
        size = math.prod(shape) * dtype.itemsize
        if size < HUGE_PAGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block, self._free = self._free, None
        if block is None or block[2] < size:
            del block  # frees the smaller block before the larger one is allocated
            block = (*_fresh_pages(size), size)
        memory, start, _ = block
        view = (ctypes.c_char * size).from_buffer(memory, start)  # lives as long as the tensor's storage
        weakref.finalize(view, self._give_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(*shape)

    def release(self) -> None:
        """Free the kept block, and keep no blocks from now on."""
        self._free = None
        self._keeps = False

    def _give_back(self, block: tuple[mmap.mmap, int, int]) -> None:
        if self._keeps and (self._free is None or self._free[2] < block[2]):
            self._free = block


def _fresh_pages(size: int) -> tuple[mmap.mmap, int]:
    """Return memory and an offset from which it has at least `size` bytes, aligned to 2 MiB in memory."""
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory: {error.strerror}") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES
    reason = why_not()
    if reason is None:
        try:
            # The tail does not fill a huge page and is left out: it would take up to 2 MiB more than `size`.
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        except OSError as error:
            reason = f"madvise failed: {error.strerror}"
    _log_once(reason)
    return memory, start


def why_not(setting: Path = _SETTING) -> str | None:
    """Return None if huge pages can be advised here; else the reason in one phrase."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "this system has no madvise for huge pages"
    try:
        text = setting.read_text()
    except OSError:
        return "the kernel was built without them"
    if "[never]" in text:
        return f"{setting} is set to never"
    return None


@cache
def _log_once(reason: str | None) -> None:
    if reason is None:
        logger.info("event=huge_pages advised=true")
    else:
        logger.info('event=huge_pages advised=false reason="%s"', reason)
