"""The layout of the shared memory of collectives: flags, votes, buffers. Torch-free, for the process that makes it."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

from oarlock.workers.distributed.topology import Topology

LINE = 64  # bytes of a cache line; each flag has one of its own


def votes_offset(size: int) -> int:
    """Offset of the votes in bytes, after one flag per rank."""
    return size * LINE


def data_offset(size: int) -> int:
    """Offset of the input buffers in bytes, after one flag and one line of votes per rank."""
    return (2 * size * LINE + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE


def total_bytes(size: int, buffer_bytes: int) -> int:
    """Bytes of shared memory for `size` ranks: flags and two input buffers per rank."""
    return data_offset(size) + 2 * size * buffer_bytes


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of one stage on one node. They share the memory of that node's ranks, and use their part of it."""

    number: int  # of the first one, among all ranks
    size: int
    place: int  # of the first one, among the ranks of its node
    ranks_of_node: int

    @staticmethod
    def of(topology: Topology, rank: int) -> "Neighbours":
        """Neighbours of `rank`, itself among them."""
        ranks = topology.neighbours_on_node(rank)
        return Neighbours(ranks.start, len(ranks), topology.local_rank(ranks.start), topology.ranks_per_node)

    @staticmethod
    def alone(size: int) -> "Neighbours":
        """Neighbours on a host whose `size` ranks are all of one stage."""
        return Neighbours(0, size, 0, size)


class RankGroup(ctypes.Structure):
    """One rank's view of that memory, as `kernels/cpu/csrc/runtime/collective.h` takes it."""

    _fields_ = (
        ("flags", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_long),
        ("rank", ctypes.c_long),
        ("size", ctypes.c_long),
        ("collective", ctypes.c_uint64),  # the latest that this rank has entered
        ("spin_s", ctypes.c_double),
        ("yields", ctypes.c_long),
        ("timeout_s", ctypes.c_double),
    )


class Flags:
    """One 64-bit counter per rank: the number of the latest collective that it has reached. Its votes can be read."""

    def __init__(self, memory_fd: int, size: int) -> None:
        self._size = size
        self._map = mmap.mmap(memory_fd, data_offset(size))
        self._flags = memoryview(self._map)[: size * LINE].cast("Q")
        self._votes = memoryview(self._map)[votes_offset(size) :][: size * LINE].cast("Q")

    def __getitem__(self, rank: int) -> int:
        return self._flags[rank * LINE // 8]

    def __setitem__(self, rank: int, collective: int) -> None:
        self._flags[rank * LINE // 8] = collective

    def read(self) -> list[int]:
        return [self[rank] for rank in range(self._size)]

    def read_votes(self) -> list[int]:
        """The latest vote that each rank has cast (`votes.py`)."""
        return [max(self._votes[rank * LINE // 8 + turn] for turn in (0, 1)) // 2 for rank in range(self._size)]

    def close(self) -> None:
        self._flags.release()
        self._votes.release()
        self._map.close()


def last_of(*progress: Sequence[int]) -> int | None:
    """The rank that is behind all others, which wait for it; None when several are equally far behind.

    `progress`: lists with one growing counter per rank. A later list decides between ranks equal in the earlier ones.
    """
    places = list(zip(*progress, strict=True))
    last = min(places)
    return places.index(last) if places.count(last) == 1 or len(places) == 1 else None
