"""Sums and gathers over the ranks of a stage that several nodes hold: shared memory within a node, gloo between them.

    each node       the first rank adds up the inputs of its node, which it reads in shared memory
    between nodes   the first ranks gather those sums over gloo, and each adds all of them
    each node       the first rank leaves the total in shared memory

Sums run over the tree of `tree_sum.py`. A node's ranks are a branch of it where they are a power of two of ranks; then
the total has the same bits as on one host. Where they are not, the first ranks gather all inputs in place of their
sums, which is more to send, and each adds them over the tree of all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.workers.distributed.shm_all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.tree_sum import tree_sum


class NodeSums:
    """Collectives of one rank. Every rank of the stage must make the same calls in the same order."""

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
