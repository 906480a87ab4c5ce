"""Layout of the shared memory of collectives (flags, votes, buffers), and the votes of ranks in it. Torch-free."""

import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oarlock.workers.distributed.topology import Topology

LINE = 64  # bytes of a cache line; each flag has its own


def votes_offset(size: int) -> int:
    """Return the offset of the votes in bytes, after one flag per rank."""
    return size * LINE


def data_offset(size: int) -> int:
    """Return the offset of the input buffers in bytes, after one flag and one line of votes per rank."""
    return (2 * size * LINE + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE


def total_bytes(size: int, buffer_bytes: int) -> int:
    """Return the bytes of shared memory for `size` ranks: flags, votes and two input buffers per rank."""
    return data_offset(size) + 2 * size * buffer_bytes


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of one stage on one node. They share the memory of that node's ranks, and use their part of it."""

    number: int  # rank of the first one, among all ranks
    size: int
    first_local: int  # index of the first one, among the ranks of its node
    ranks_of_node: int

    @staticmethod
    def of(topology: Topology, rank: int) -> "Neighbours":
        """Return the neighbours of `rank`, including itself."""
        ranks = topology.neighbours_on_node(rank)
        return Neighbours(ranks.start, len(ranks), topology.local_rank(ranks.start), topology.ranks_per_node)

    @staticmethod
    def of_whole_node(size: int) -> "Neighbours":
        """Return the neighbours on a host whose `size` ranks are all of one stage."""
        return Neighbours(0, size, 0, size)


class Flags:
    """One 64-bit counter per rank, the number of the latest collective that it has reached; and read access to the
    votes."""

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
        """Return the number of the latest vote that each rank has cast (see `Votes`)."""
        return [max(self._votes[rank * LINE // 8 + turn] for turn in (0, 1)) // 2 for rank in range(self._size)]

    def close(self) -> None:
        self._flags.release()
        self._votes.release()
        self._map.close()


def last_of(*progress: Sequence[int]) -> int | None:
    """Return the rank that is behind all others, which wait for it; None if several are equally far behind.

    `progress`: lists with one growing counter per rank. A later list decides between ranks equal in the earlier ones.
    """
    places = list(zip(*progress, strict=True))
    last = min(places)
    return places.index(last) if places.count(last) == 1 or len(places) == 1 else None


STORES_KEEP_ORDER = platform.machine() in ("x86_64", "AMD64")

_lock = threading.Lock()


def fence() -> None:
    """Issue a full memory barrier: no later access becomes visible before any earlier access, on every processor.

    Python has no instruction for it. Releasing a lock keeps earlier accesses before it, acquiring a lock keeps later
    accesses after it, and a release and an acquire of the same lock keep their order. So two rounds are a full barrier.

    x86 keeps program order. ARM and others may reorder a later store before an earlier access, so that a counter could
    mark a message as finished before its slot was read. A writer that wakes its reader through a pipe needs no fence,
    because writing to and reading from a pipe take the same lock in the kernel. This is for counters that are polled.
    """
    with _lock:
        pass
    with _lock:
        pass


_YIELDS = 20_000  # some ten milliseconds, longer than ranks usually differ
_SLEEP_S = 50e-6


class Votes:
    """Votes of one rank. Every rank must cast the same votes in the same order.

    A vote is yes or no and takes a few microseconds, without a collective of the device. If several nodes hold the
    stage, the first rank of each node exchanges its result with the other first ranks between two votes of its node.

    Each rank has a cache line with two counters: the number of its latest even and of its latest odd vote, doubled,
    plus 1 for yes. Two are enough: a rank that casts vote n has seen all votes n - 1, each cast after all n - 2 were
    read.
    """

    def __init__(
        self,
        memory_fd: int,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        within: Neighbours | None = None,
        other_nodes_agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Map the votes. `memory_fd`: the shared memory of collectives. `rank`, `size`: on this node. `timeout_s`:
        limit of each vote. `within`: position of these ranks among the ranks of their node; None if they are all of
        them. `other_nodes_agree`: takes this node's result, and returns whether all nodes vote yes; None if there is no
        other node. Only the first rank calls it."""
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._other_nodes_agree = other_nodes_agree
        where = self._within = within or Neighbours.of_whole_node(size)
        self._map = mmap.mmap(memory_fd, data_offset(where.ranks_of_node))
        first = votes_offset(where.ranks_of_node) + where.first_local * LINE
        self._cells = memoryview(self._map)[first:][: size * LINE].cast("Q")
        self._number = 0

    def all_agree(self, vote: bool) -> bool:
        """Cast this rank's vote, wait for all others, and return whether every vote is yes. Raises `TimeoutError`, or
        `PeerLostError` for a rank of another node."""
        here = self._all_here_agree(vote)
        if self._other_nodes_agree is None:
            return here
        return self._all_here_agree(self._other_nodes_agree(here) if self._rank == 0 else here)

    def _all_here_agree(self, vote: bool) -> bool:
        self._number += 1
        self._cells[self._index(self._rank)] = 2 * self._number + vote
        votes = [self._vote_of(rank) for rank in range(self._size)]  # a list, so that all votes are waited for
        return all(votes)

    def _index(self, rank: int) -> int:
        return rank * LINE // 8 + self._number % 2

    def _vote_of(self, rank: int) -> bool:
        cells, index = self._cells, self._index(rank)
        for _ in range(_YIELDS):
            if cells[index] >= 2 * self._number:
                return bool(cells[index] % 2)
            os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while cells[index] < 2 * self._number:
            time.sleep(_SLEEP_S)
            if time.monotonic() > deadline:
                number = self._within.number + rank
                raise TimeoutError(f"rank {number} did not cast vote {self._number} within {self._timeout_s} s")
        return bool(cells[index] % 2)

    def close(self) -> None:
        self._cells.release()
        self._map.close()
