"""All-reduce and all-gather over a stage's ranks: shared memory, gloo between nodes, and on CUDA the fastest measured.

Values are added over a balanced binary tree, each half of which is itself such a tree. A rank that holds several
neighbouring slices of a matmul's inputs therefore computes a subtree of the same tree, so the total has the same bits
with any number of ranks, and on every rank.
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

from oarlock.workers.distributed.shm_layout import LINE, STORES_KEEP_ORDER, Neighbours, data_offset, total_bytes
from oarlock.workers.kernels.cpu.structures import CRankGroup


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return ((0 + 1) + (2 + 3)) + ... of tensors with one shape, in their own dtype. The left half has a power of two
    of them."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


_SPINS_BEFORE_YIELD = 2_000  # about 100 us, longer than ranks usually differ if each has its own core
_SPIN_S = 30e-6  # spin time of the C++ kernels before they yield, for the same reason
_YIELDS_BEFORE_SLEEP = 2_000
# If there are fewer cores than ranks, a waiting rank takes processor time from the rank that it waits for. Fewer yields
# before sleeping then complete more collectives per second in less processor time.
_CROWDED_YIELDS_BEFORE_SLEEP = 50
_SLEEP_S = 50e-6


class PeerLostError(RuntimeError):
    """Another rank did not reach the collective in time: it has ended, is stopped, or is far too slow. If it is on
    another node, it may also have closed its connection."""


class SharedMemoryGroup:
    """Collectives of one rank. Every rank must make the same calls in the same order.

    A decode step of a small model makes two all-reduces of some kilobytes per layer. Through gloo's sockets the
    all-reduces of a step would take as long as the model itself.

        flags    one 64-bit counter per rank, one cache line each: the collective whose input that rank has published
        inputs   2 x size buffers of `buffer_bytes`: rank r writes collective n to buffer [n % 2][r]

    Two buffers are enough: a rank that enters collective n has seen every flag reach n - 1, and a peer sets its flag to
    n - 1 only after it finished reading collective n - 2, the previous content of buffer [n % 2].

    Between the halves of C++ layers the kernels run the same algorithm on the same memory
    (`csrc/runtime/collective.cpp`) without a return to Python; this class is their reference. It relies on stores
    becoming visible in program order, so `supported()` is false outside x86, and the caller uses gloo.
    """

    all_reduce_method = "shared memory"

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
        """Map the shared memory. `shares_cores`: there are fewer cores than ranks, so a waiting rank yields its core at
        once. `within`: position of these ranks among the ranks of their node; None if they are all of them."""
        self.rank = rank
        self.size = size
        self.buffer_bytes = buffer_bytes
        self._within = within or Neighbours.of_whole_node(size)
        assert self._within.size == size
        ranks, first = self._within.ranks_of_node, self._within.first_local
        self._map = mmap.mmap(memory_fd, total_bytes(ranks, buffer_bytes))
        self._flags = memoryview(self._map)[first * LINE :][: size * LINE].cast("Q")
        inputs = data_offset(ranks) + 2 * first * buffer_bytes
        self._raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=inputs, count=2 * size * buffer_bytes)
        self._spins = 0 if shares_cores else _SPINS_BEFORE_YIELD
        # The kernels' collectives advance the same counter, so both kinds may follow each other.
        self._group = CRankGroup(
            ctypes.addressof(ctypes.c_char.from_buffer(self._map, first * LINE)), self._raw.data_ptr(), buffer_bytes,
            rank, size, 0, 0.0 if shares_cores else _SPIN_S,
            _CROWDED_YIELDS_BEFORE_SLEEP if shares_cores else _YIELDS_BEFORE_SLEEP, timeout_s,
        )  # fmt: skip

    @staticmethod
    def supported() -> bool:
        return STORES_KEEP_ORDER

    @property
    def address(self) -> int:
        """Address of the `CRankGroup` with which kernels take part in this group's collectives."""
        return ctypes.addressof(self._group)

    def lost(self, rank: int) -> PeerLostError:
        """Return the error to raise if `rank` has not reached this rank's current collective."""
        number = self._within.number + rank
        return PeerLostError(
            f"rank {number} did not reach collective {self._group.collective} within {self._group.timeout_s} s"
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Write the sum over ranks into `x` (contiguous, on the CPU) and return `x`."""
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
        """Return every rank's `x` in rank order: [size, *x.shape]."""
        flat = x.contiguous().view(-1)
        out = torch.empty((self.size, flat.numel()), dtype=x.dtype)
        limit = self.buffer_bytes // x.element_size()
        for start in range(0, flat.numel(), limit):
            part = flat[start : start + limit]
            for rank, peer in enumerate(self._exchange(part)):
                out[rank, start : start + limit] = peer
        return out.view(self.size, *x.shape)

    def to_first(self, part: Tensor) -> list[Tensor]:
        """Run a collective that only the first rank waits for. Return views of every rank's `part` (flat, fits a
        buffer) on the first rank, and an empty list on the others. `from_first` must follow."""
        if self.size == 1:
            self._enter()
            return [part]
        inputs = self._publish(part)
        if self.rank:
            return []
        self._wait_for_all()
        return inputs

    def from_first(self, part: Tensor) -> None:
        """Copy the first rank's `part` (contiguous, fits a buffer) to every rank's."""
        # Two buffers are enough here too. Only the first rank reads the inputs of `to_first`, and its flag shows that
        # it has. The other ranks had read its previous content of this buffer before they set their flags for that
        # `to_first`.
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
        """Enter the next collective without an input of this rank."""
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


class NodeAllReduce:
    """Collectives of one rank. Every rank of the stage must make the same calls in the same order.

        each node       the first rank adds up the inputs of its node, which it reads in shared memory
        between nodes   the first ranks gather those sums over gloo, and each adds all of them
        each node       the first rank leaves the total in shared memory

    If the number of ranks per node is a power of two, a node's ranks are a branch of the tree, and the total has the
    same bits as on one host. Otherwise the first ranks gather all inputs instead of their sums, which is more to send,
    and each adds them over the tree of all ranks.
    """

    all_reduce_method = "shared memory, and gloo between nodes"

    def __init__(self, local: SharedMemoryGroup, nodes: int, first_ranks: dist.ProcessGroup | None) -> None:
        """Join the nodes of a stage. `local`: the stage's ranks on this node; each of the `nodes` has the same number.
        `first_ranks`: process group of the first rank of each node, in order; None on the other ranks."""
        assert (first_ranks is None) == (local.rank > 0)
        self._local = local
        self._nodes = nodes
        self._first_ranks = first_ranks
        self._adds_here = local.size & (local.size - 1) == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Write the sum over ranks into `x` (contiguous, on the CPU) and return `x`."""
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
        """Return every rank's `x` in rank order: [ranks, *x.shape]."""
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

    def all_agree(self, own: bool) -> bool:
        """Return whether `own` is true on every first rank. Only first ranks call this."""
        return all(vote.item() for vote in self._from_all_nodes(torch.tensor([own], dtype=torch.uint8)))

    def _add_up(self, inputs: list[Tensor], total: Tensor) -> None:
        """Write the sum over all nodes' ranks to `total`. `inputs`: from this node's ranks."""
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

    def _from_all_nodes(self, own: Tensor) -> list[Tensor]:
        """Return `own` (contiguous) of the first rank of each node, in order."""
        every = [torch.empty_like(own) for _ in range(self._nodes)]
        assert self._first_ranks is not None, "only first ranks exchange sums"
        self._first_ranks.allgather([[_bytes_of(part) for part in every]], [_bytes_of(own)]).wait()
        return every


def _bytes_of(x: Tensor) -> Tensor:
    """Return a view of `x` (contiguous) as bytes: gloo does not support every dtype."""
    return x.view(-1).view(torch.uint8)


AllReduce = Callable[[Tensor], Tensor]

SIZES = tuple(4 << 10 << 2 * power for power in range(6))  # bytes, up to 4 MiB; larger tensors use NCCL
_ALIGN = 16  # bytes that a kernel of one rank reads at once
_WARM, _TIMED = 3, 20  # all-reduces before and during a measurement


class DeviceAllReduce:
    """All-reduce by the algorithm that was fastest at the next larger of `SIZES`.

    With symmetric memory, each rank copies its input there. One-shot: each rank adds all inputs. Two-shot: each rank
    adds its part and sends the sum to the others. Multimem: as two-shot, but the switch adds. One-shot should have less
    latency than NCCL's protocol for the few kilobytes of a decode step. Not measured on a GPU yet.
    """

    def __init__(
        self, algorithms: Mapping[str, AllReduce], fastest: Sequence[str], dtype: torch.dtype, ranks: int
    ) -> None:
        """Set the algorithms. `algorithms`: by name, including NCCL. `fastest`: name for each of `SIZES`. `dtype`: of
        the symmetric memory."""
        self._algorithms, self._fastest, self._dtype, self._unit = algorithms, fastest, dtype, _ALIGN * ranks

    def __call__(self, x: Tensor) -> Tensor:
        bucket = bisect_left(SIZES, x.nbytes)
        fits = bucket < len(self._fastest) and x.dtype == self._dtype and x.nbytes % self._unit == 0
        return self._algorithms[self._fastest[bucket] if fits else NCCL](x)


NCCL = "NCCL"


def choose_device_all_reduce(
    nccl: AllReduce,
    others: Mapping[str, AllReduce | str],
    x: Tensor,
    ranks: int,
    agree: Callable[[float], float],
    seconds_of: Callable[[AllReduce, Tensor], float],
) -> tuple[DeviceAllReduce, str]:
    """Return the all-reduce that uses the fastest algorithm for each size, and a line that describes the choice.

    `others`: algorithms by name, or the reason why one is not available; their sums must equal NCCL's. `x`: small
    integers, with the number of elements of the largest all-reduce. `agree`: returns the maximum over all ranks, so
    that all ranks choose the same.
    """
    there, notes = {NCCL: nccl}, []
    for name, algorithm in others.items():
        if agree(float(isinstance(algorithm, str))) or isinstance(algorithm, str):
            notes.append(f"no {name}: {algorithm if isinstance(algorithm, str) else 'on another rank'}")
        elif agree(float(not torch.equal(algorithm(x.clone()), nccl(x.clone())))):
            notes.append(f"no {name}: its results are wrong")
        else:
            there[name] = algorithm
    fastest, times = [], []
    for size in SIZES if len(there) > 1 else ():
        part = x[: size // x.itemsize]
        seconds = {name: agree(seconds_of(algorithm, part)) for name, algorithm in there.items()}
        fastest.append(min(seconds, key=seconds.__getitem__))
        each = ", ".join(f"{name} {taken * 1e6:.0f}" for name, taken in seconds.items())
        times.append(f"{size >> 10} KiB by {fastest[-1]} ({each} us)")
    line = "; ".join([*(times or [NCCL]), *notes])
    return DeviceAllReduce(there, fastest, x.dtype, ranks), line


def seconds_on_device(add: AllReduce, x: Tensor) -> float:
    """Return the seconds of one all-reduce out of many in a CUDA graph, as decode steps launch them."""
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
