"""Votes of all ranks of one stage on yes or no, in a few microseconds, without a collective of the device.

Where several nodes hold the stage, the first rank of each asks those of the others between two votes of its node.

Each rank has a cache line with two counters: the number of its latest even and of its latest odd vote, doubled, plus 1
for yes. Two are enough: a rank that casts vote n has seen all votes n - 1, each cast after all n - 2 were read.
"""

import mmap
import os
import time
from collections.abc import Callable

from oarlock.workers.distributed.shm_layout import LINE, Neighbours, data_offset, votes_offset

_YIELDS = 20_000  # some ten milliseconds, longer than ranks differ
_SLEEP_S = 50e-6


class Votes:
    """Votes of one rank. Every rank must cast the same votes in the same order."""

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
        """`memory_fd`: the shared memory of collectives. `rank`, `size`: on this node. `timeout_s`: of each vote.
        `within`: where these ranks are among those of their node; None: they are all. `other_nodes_agree`: takes what
        this node says, and tells whether all nodes say yes; None: there is no other. The first rank calls it."""
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._other_nodes_agree = other_nodes_agree
        where = self._within = within or Neighbours.alone(size)
        self._map = mmap.mmap(memory_fd, data_offset(where.ranks_of_node))
        first = votes_offset(where.ranks_of_node) + where.place * LINE
        self._cells = memoryview(self._map)[first:][: size * LINE].cast("Q")
        self._number = 0

    def all_agree(self, mine: bool) -> bool:
        """Cast this rank's vote, and wait for all: whether every one is yes. Raises `TimeoutError`, or
        `PeerLostError` of another node's rank."""
        here = self._all_here_agree(mine)
        if self._other_nodes_agree is None:
            return here
        return self._all_here_agree(self._other_nodes_agree(here) if self._rank == 0 else here)

    def _all_here_agree(self, mine: bool) -> bool:
        self._number += 1
        self._cells[self._index(self._rank)] = 2 * self._number + mine
        votes = [self._vote_of(rank) for rank in range(self._size)]  # all are waited for
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
