"""Release of freed request memory to the operating system.

glibc keeps freed memory in its heap for later, and a peak of large buffers leaves gaps everywhere. Large buffers are
therefore mapped one by one, and unmapped when freed. If the process has grown nevertheless, the garbage collector runs
and the heap is trimmed. Other C libraries return memory in their own way.
"""

import asyncio
import ctypes
import gc
import sys

from oarlock.base.process_memory import CAN_TRIM, memory_use, trim

_M_MMAP_THRESHOLD = -3  # parameter of mallopt(3)
_MAPPED_BYTES = 256 * 1024  # minimum size of mapped buffers; glibc would raise its own limit up to 32 MiB
_GROWN_BYTES = 48 * 2**20  # growth since the last trim
_MIN_WAIT_S, _MAX_WAIT_S = 4.0, 300.0


def map_large_buffers() -> None:
    """Make the allocator map large buffers one by one, if it is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class MemoryRelease:
    """Trims the heap of this process after it has grown, and less often while trimming frees nothing."""

    def __init__(self) -> None:
        self._trimming: asyncio.Future[None] | None = None
        self._least_bytes = sys.maxsize  # the least resident memory so far
        self._left_bytes = 0  # resident memory after the last trim
        self._wait_s = _MIN_WAIT_S  # least time between the last trim and the next
        self._trimmed_s = 0.0

    def look(self) -> None:
        """Trim the heap in a thread if the process has grown."""
        if not CAN_TRIM or (self._trimming is not None and not self._trimming.done()):
            return
        resident, loop = memory_use().resident, asyncio.get_running_loop()
        self._least_bytes = min(self._least_bytes, resident)
        if resident > self._left_bytes + _GROWN_BYTES:
            self._wait_s = _MIN_WAIT_S
        if resident > self._least_bytes + _GROWN_BYTES and loop.time() - self._trimmed_s > self._wait_s:
            self._trimming = loop.run_in_executor(None, self._release, resident)
            self._trimmed_s = loop.time()

    def _release(self, resident: int) -> None:
        gc.collect()
        trim()
        self._left_bytes = memory_use().resident
        helped = resident - self._left_bytes > _GROWN_BYTES // 4
        self._wait_s = _MIN_WAIT_S if helped else min(2 * self._wait_s, _MAX_WAIT_S)
