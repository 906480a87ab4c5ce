"""Memory of this process: the kernel's counts, a limit on mapped memory, and the return of freed memory."""

import mmap
import resource
import sys

import pytest

from oarlock.base.process_memory import CAN_TRIM, memory_use
from oarlock.base.python_child import start_python

SIZE = 64 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process")


def test_mapped_and_resident_memory_are_counted_apart() -> None:
    before = memory_use()
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        mapped = memory_use()
        memory[:: resource.getpagesize()] = bytes(SIZE // resource.getpagesize())
        touched = memory_use()
    assert mapped.mapped - before.mapped >= SIZE and mapped.resident - before.resident < SIZE // 4
    assert touched.resident - before.resident > SIZE * 3 // 4
    assert memory_use().mapped - before.mapped < SIZE


def test_pages_of_files_are_counted_apart() -> None:
    use = memory_use()
    assert 0 < use.of_files < use.resident < use.mapped  # the interpreter and its libraries are files


@pytest.mark.slow
@pytest.mark.parametrize(("hard", "is_refused"), [(None, True), (256 << 20, True), (1 << 40, False)])
def test_memory_beyond_the_limit_is_refused(hard: int | None, is_refused: bool) -> None:
    """`hard`: a hard limit, which stays in force if it is lower than the limit."""
    limit = "limit_mapped_bytes(memory_use().mapped + (64 << 20))"
    if hard is not None:
        limit = f"resource.setrlimit(resource.RLIMIT_AS, ({hard}, {hard})); limit_mapped_bytes(1 << 50)"
    code = f"""
import resource, sys
from oarlock.base.process_memory import limit_mapped_bytes, memory_use
{limit}
try:
    bytearray(512 << 20)
except MemoryError:
    sys.exit(9)
"""
    with start_python(["-c", code]) as process:
        assert process.wait(60) == (9 if is_refused else 0)


# Freed memory that the heap of an older process kept would hold the texts, and nothing would grow.
IN_A_NEW_PROCESS = """
from oarlock.base.process_memory import memory_use, trim
before = memory_use().resident
texts = [bytes([number % 256]) * 2000 for number in range(40_000)]  # too small to be mapped one by one
kept = texts[::400]  # holes are left between them
grown = memory_use().resident - before
del texts
trim()
left = memory_use().resident - before
assert grown > 60 << 20 and left < grown // 2 and len(kept) == 100, (grown, left)
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_TRIM, reason="this C library has no malloc_trim")
def test_freed_memory_is_returned() -> None:
    with start_python(["-c", IN_A_NEW_PROCESS]) as process:
        assert process.wait(60) == 0
