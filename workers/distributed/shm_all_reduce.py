"""All-reduce and all-gather between the ranks of one host through shared memory, in a few microseconds.

A decode step of a small model makes two all-reduces of some kilobytes per layer. Through gloo's sockets each takes 100
to 330 microseconds, which for 24 layers is as long as the model itself.

    flags    one 64-bit counter per rank, one cache line each: the collective whose input that rank has published
    inputs   2 x size buffers of `buffer_bytes`: rank r writes collective n to buffer [n % 2][r]

Two buffers are enough: a rank that enters collective n has seen every flag reach n - 1, and a peer sets its flag to
n - 1 only after it finished reading collective n - 2, which is what buffer [n % 2] held before.

Between the C++ layers' halves the kernels do the same on the same memory (`csrc/runtime/collective.cpp`), without a
return to Python; this form is what they are compared with.

Relies on stores becoming visible in program order (`memory_order.py`), so `supported()` is false outside x86, and the
caller uses gloo. Sums run over a tree (`tree_sum.py`) in float32 on every rank: all ranks end with the same bits.
"""

import ctypes
import mmap
import os
import time

import torch
from torch import Tensor

from oarlock.workers.distributed.memory_order import STORES_KEEP_ORDER
from oarlock.workers.distributed.shm_layout import LINE, Neighbours, RankGroup, data_offset, total_bytes
from oarlock.workers.distributed.tree_sum import tree_sum

_SPINS_BEFORE_YIELD = 2_000  # about 100 us: longer than ranks differ while each has a core of its own
_SPIN_S = 30e-6  # of the kernels, likewise
_YIELDS_BEFORE_SLEEP = 2_000
# With fewer cores than ranks, a waiting rank takes processor time from the one it waits for. Four ranks on two cores do
# 2 to 3.5 times as many collectives per second as with the numbers above, in half the processor time.
_CROWDED_YIELDS_BEFORE_SLEEP = 50
_SLEEP_S = 50e-6


class PeerLostError(RuntimeError):
    """Another rank did not reach the collective in time: it has ended, is stopped, or is far too slow. On another node,
    it may also have closed its connection."""


class SharedMemoryGroup:
    """Collectives of one rank. Every rank must make the same calls in the same order."""

    sums_by = "shared memory"

    def __init__(
        self,
        memory_fd: int,
        rank: int,
        size: int,
        buffer_bytes: int,
        timeout_s: float,
        *,
        shares_cores: bool = False,
        within: Neighbours | None = None,
    ) -> None:
        """`shares_cores`: there are fewer cores than ranks, so one that waits makes way for the others at once.
        `within`: where these ranks are among those of their node; None: they are all."""
        self.rank = rank
        self.size = size
        self.buffer_bytes = buffer_bytes
        self._within = within or Neighbours.alone(size)
        assert self._within.size == size
        ranks, place = self._within.ranks_of_node, self._within.place
        self._map = mmap.mmap(memory_fd, total_bytes(ranks, buffer_bytes))
        self._flags = memoryview(self._map)[place * LINE :][: size * LINE].cast("Q")
        inputs = data_offset(ranks) + 2 * place * buffer_bytes
        self._raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=inputs, count=2 * size * buffer_bytes)
        self._spins = 0 if shares_cores else _SPINS_BEFORE_YIELD
        # Also counts the collectives of this form: both may follow each other.
        self._group = RankGroup(
            ctypes.addressof(ctypes.c_char.from_buffer(self._map, place * LINE)), self._raw.data_ptr(), buffer_bytes,
            rank, size, 0, 0.0 if shares_cores else _SPIN_S,
            _CROWDED_YIELDS_BEFORE_SLEEP if shares_cores else _YIELDS_BEFORE_SLEEP, timeout_s,
        )  # fmt: skip

    @staticmethod
    def supported() -> bool:
        return STORES_KEEP_ORDER

    @property
    def address(self) -> int:
        """Address of the `RankGroup` with which kernels take part in this group's collectives."""
        return ctypes.addressof(self._group)

    def lost(self, rank: int) -> PeerLostError:
        """The error when `rank` has not reached the collective that this rank is in."""
        number = self._within.number + rank
        return PeerLostError(
            f"rank {number} did not reach collective {self._group.collective} within {self._group.timeout_s} s"
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, written into `x` (contiguous, on the CPU) and returned."""
        flat = x.view(-1)
        limit = self.buffer_bytes // x.element_size()
        for start in range(0, flat.numel(), limit):
            part = flat[start : start + limit]
            inputs = self._exchange(part)
            if self.size == 2:
                torch.add(inputs[0], inputs[1], out=part)
            else:
                part.copy_(tree_sum([peer.float() for peer in inputs]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` in rank order: [size, *x.shape]."""
        flat = x.contiguous().view(-1)
        out = torch.empty((self.size, flat.numel()), dtype=x.dtype)
        limit = self.buffer_bytes // x.element_size()
        for start in range(0, flat.numel(), limit):
            part = flat[start : start + limit]
            for rank, peer in enumerate(self._exchange(part)):
                out[rank, start : start + limit] = peer
        return out.view(self.size, *x.shape)

    def to_first(self, part: Tensor) -> list[Tensor]:
        """A collective that only the first rank waits for: it gets views of every rank's `part` (flat, fits a buffer),
        the others nothing. `from_first` must follow."""
        if self.size == 1:
            self._enter()
            return [part]
        inputs = self._publish(part)
        if self.rank:
            return []
        self._wait_for_all()
        return inputs

    def from_first(self, part: Tensor) -> None:
        """Fill every rank's `part` (contiguous, fits a buffer) with the first rank's."""
        # Two are enough here too. Those of `to_first` only the first rank reads, and its flag shows that it has;
        # what it wrote here before, the others had read when they set their flags for the `to_first` ahead of this.
        if self.size == 1:
            self._enter()
        elif self.rank == 0:
            self._publish(part.view(-1))
        else:
            self._enter()
            self._wait_for(0)
            part.view(-1).copy_(self._buffer(0, part.numel(), part.dtype))

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Publish `part`, wait for all peers, and return views of every rank's input in rank order."""
        inputs = self._publish(part)
        self._wait_for_all()
        return inputs

    def _enter(self) -> None:
        """The next collective, in which this rank has no input."""
        self._group.collective += 1
        self._flags[self.rank * LINE // 8] = self._group.collective

    def _publish(self, part: Tensor) -> list[Tensor]:
        self._group.collective += 1
        count, dtype = part.numel(), part.dtype
        inputs = [self._buffer(rank, count, dtype) for rank in range(self.size)]
        inputs[self.rank].copy_(part)
        self._flags[self.rank * LINE // 8] = self._group.collective
        return inputs

    def _wait_for_all(self) -> None:
        for rank in range(self.size):
            self._wait_for(rank)

    def _buffer(self, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        start = (self._group.collective % 2 * self.size + rank) * self.buffer_bytes
        return self._raw[start : start + count * dtype.itemsize].view(dtype)

    def _wait_for(self, rank: int) -> None:
        flags, index, sequence = self._flags, rank * LINE // 8, self._group.collective
        for _ in range(self._spins):
            if flags[index] >= sequence:
                return
        for _ in range(self._group.yields):
            if flags[index] >= sequence:
                return
            os.sched_yield()
        deadline = time.monotonic() + self._group.timeout_s
        while flags[index] < sequence:
            time.sleep(_SLEEP_S)
            if time.monotonic() > deadline:
                raise self.lost(rank)
