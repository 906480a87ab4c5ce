"""Sums and gathers over the ranks of a stage: through shared memory, between nodes over gloo, on CUDA as measured.

Sums are added over a balanced binary tree, each half of which is a sum by itself. So a rank that holds some
neighbouring slices of a product's inputs adds them up to what another number of ranks has at the same place, and the
total has the same bits at every number of ranks, and on all of them.
"""

import ctypes
import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.workers.distributed.shm_layout import (
    LINE,
    STORES_KEEP_ORDER,
    Neighbours,
    RankGroup,
    data_offset,
    total_bytes,
)


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ...: tensors of one shape, in their own dtype. The left half is a power of two of them."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


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
    """Collectives of one rank. Every rank must make the same calls in the same order.

    A decode step of a small model makes two all-reduces of some kilobytes per layer. Through gloo's sockets each takes
    100 to 330 microseconds, which for 24 layers is as long as the model itself.

        flags    one 64-bit counter per rank, one cache line each: the collective whose input that rank has published
        inputs   2 x size buffers of `buffer_bytes`: rank r writes collective n to buffer [n % 2][r]

    Two buffers are enough: a rank that enters collective n has seen every flag reach n - 1, and a peer sets its flag to
    n - 1 only after it finished reading collective n - 2, which is what buffer [n % 2] held before.

    Between the C++ layers' halves the kernels do the same on the same memory (`csrc/runtime/collective.cpp`), without a
    return to Python; this form is what they are compared with. It relies on stores becoming visible in program order,
    so `supported()` is false outside x86, and the caller uses gloo.
    """

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


class NodeSums:
    """Collectives of one rank. Every rank of the stage must make the same calls in the same order.

        each node       the first rank adds up the inputs of its node, which it reads in shared memory
        between nodes   the first ranks gather those sums over gloo, and each adds all of them
        each node       the first rank leaves the total in shared memory

    A node's ranks are a branch of the tree where they are a power of two of ranks; then the total has the same bits as
    on one host. Where they are not, the first ranks gather all inputs in place of their sums, which is more to send,
    and each adds them over the tree of all ranks.
    """

    sums_by = "shared memory, and gloo between nodes"

    def __init__(self, local: SharedMemoryGroup, nodes: int, first_ranks: dist.ProcessGroup | None) -> None:
        """`local`: the stage's ranks on this node, equally many on each of `nodes`. `first_ranks`: the first rank of
        each node, in order; given to those alone."""
        assert (first_ranks is None) == (local.rank > 0)
        self._local = local
        self._nodes = nodes
        self._first_ranks = first_ranks
        self._adds_here = local.size & (local.size - 1) == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, written into `x` (contiguous, on the CPU) and returned."""
        flat = x.view(-1)
        limit = self._local.buffer_bytes // x.element_size()
        for start in range(0, flat.numel(), limit):
            part = flat[start : start + limit]
            inputs = self._local.to_first(part)
            if inputs:
                self._add_up(inputs, part)
            self._local.from_first(part)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` in rank order: [ranks, *x.shape]."""
        flat = x.contiguous().view(-1)
        nodes, ranks = self._nodes, self._local.size
        out = torch.empty((nodes, ranks, flat.numel()), dtype=x.dtype)
        bytes_each = x.element_size() * nodes * ranks  # all inputs go through one buffer
        limit = max(1, self._local.buffer_bytes // bytes_each)
        for start in range(0, flat.numel(), limit):
            part = flat[start : start + limit]
            every = torch.empty((nodes, ranks, part.numel()), dtype=x.dtype)
            inputs = self._local.to_first(part)
            if inputs:
                torch.stack(self._from_all_nodes(torch.stack(inputs)), out=every)
            self._local.from_first(every)
            out[..., start : start + limit] = every
        return out.view(nodes * ranks, *x.shape)

    def all_agree(self, mine: bool) -> bool:
        """Whether every first rank says yes. Only first ranks call this."""
        return all(said.item() for said in self._from_all_nodes(torch.tensor([mine], dtype=torch.uint8)))

    def _add_up(self, inputs: list[Tensor], total: Tensor) -> None:
        """The inputs of this node's ranks -> the sum of all nodes' ranks."""
        if len(inputs) > 1:
            added = tree_sum([part.float() for part in inputs]) if self._adds_here else torch.cat(inputs)
        else:
            added = inputs[0]
        parts = self._from_all_nodes(added)
        if len(inputs) > 1 and not self._adds_here:
            parts = [part for of_node in parts for part in of_node.chunk(len(inputs))]
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=total)  # in float32, rounded once
        else:
            total.copy_(tree_sum([part.float() for part in parts]))

    def _from_all_nodes(self, mine: Tensor) -> list[Tensor]:
        """`mine` (contiguous) of the first rank of each node, in order."""
        every = [torch.empty_like(mine) for _ in range(self._nodes)]
        assert self._first_ranks is not None, "only first ranks exchange sums"
        self._first_ranks.allgather([[_bytes_of(part) for part in every]], [_bytes_of(mine)]).wait()
        return every


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes of `x` (contiguous), in place: gloo does not know every type."""
    return x.view(-1).view(torch.uint8)


Sum = Callable[[Tensor], Tensor]

SIZES = tuple(4 << 10 << 2 * power for power in range(6))  # bytes, to 4 MiB; beyond the last as at the last
_ALIGN = 16  # bytes, which a kernel of one rank reads at once
_WARM, _TIMED = 3, 20  # sums


class DeviceSum:
    """The sum over ranks by the way that was the fastest at the next larger of `SIZES`.

    Of symmetric memory, which each rank copies its input to: one-shot, where each then adds all inputs; two-shot, where
    each adds its part and hands it on; multimem, the same with additions by the switch. For a decode step's few
    kilobytes one-shot takes less than NCCL's protocol. Not measured on a GPU yet.
    """

    def __init__(self, ways: Mapping[str, Sum], fastest: Sequence[str], dtype: torch.dtype, ranks: int) -> None:
        """`ways`: by name, NCCL's among them. `fastest`: for each of `SIZES`. `dtype`: that symmetric memory holds."""
        self._ways, self._fastest, self._dtype, self._unit = ways, fastest, dtype, _ALIGN * ranks

    def __call__(self, x: Tensor) -> Tensor:
        place = bisect_left(SIZES, x.nbytes)
        fits = place < len(self._fastest) and x.dtype == self._dtype and x.nbytes % self._unit == 0
        return self._ways[self._fastest[place] if fits else NCCL](x)


NCCL = "NCCL"


def choose_device_sum(
    nccl: Sum,
    others: Mapping[str, Sum | str],
    x: Tensor,
    ranks: int,
    agree: Callable[[float], float],
    seconds_of: Callable[[Sum, Tensor], float],
) -> tuple[DeviceSum, str]:
    """The fastest way by size, and a line that says so.

    `others`: ways by name, or why there is none; they must give NCCL's sums. `x`: as many small whole numbers as the
    largest sum has. `agree`: the largest of all ranks' numbers, so that all choose the same.
    """
    there, notes = {NCCL: nccl}, []
    for name, way in others.items():
        if agree(float(isinstance(way, str))) or isinstance(way, str):
            notes.append(f"no {name}: {way if isinstance(way, str) else 'on another rank'}")
        elif agree(float(not torch.equal(way(x.clone()), nccl(x.clone())))):
            notes.append(f"no {name}: its sums are wrong")
        else:
            there[name] = way
    fastest, times = [], []
    for size in SIZES if len(there) > 1 else ():
        part = x[: size // x.itemsize]
        seconds = {name: agree(seconds_of(way, part)) for name, way in there.items()}
        fastest.append(min(seconds, key=seconds.__getitem__))
        each = ", ".join(f"{name} {taken * 1e6:.0f}" for name, taken in seconds.items())
        times.append(f"{size >> 10} KiB by {fastest[-1]} ({each} us)")
    line = "; ".join([*(times or [NCCL]), *notes])
    return DeviceSum(there, fastest, x.dtype, ranks), line


def seconds_on_device(add: Sum, x: Tensor) -> float:
    """Seconds of one sum among many in a graph, as the steps of a decode launch them."""
    x = torch.zeros_like(x)
    for _ in range(_WARM):
        add(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_TIMED):
            add(x)
    torch.cuda.synchronize(x.device)
    begun = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize(x.device)
    seconds = (time.perf_counter() - begun) / _TIMED
    graph.reset()
    return seconds
