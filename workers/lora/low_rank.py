"""Memory of the pairs of one linear layer in all slots, and their two small matmuls.

A pair updates the rows of a step that belong to its slot: `y += scale * B (A x)`. A rank holds A's columns for its
inputs and B's rows for its outputs. Pairs of a fused layer, such as q, k and v, have the same inputs and are multiplied
together. Memory is allocated once, for `max_rank`; pairs of a lower rank are filled up with zeros.

Numbers. A and B have the model's dtype. `A x` is summed in float32, slice by slice of the inputs; the sums of slices
are added in the tree that also adds the layer's own slices, then the scale is multiplied and B is applied to the
unrounded values. B is applied once, after the sum over ranks: B (A_0 x_0) + B (A_1 x_1) = B (A_0 x_0 + A_1 x_1), so
ranks exchange `rank` values of each row, not its outputs, and every number of ranks has the same bits. The computation
here is the reference. It sums in float64 and rounds the sums to float32, which hides the order of additions: the bits
of a row depend on no other row.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.structures import CAdapterPairs
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.method import WeightShard


@dataclass(frozen=True, slots=True)
class RankPair:
    """One rank's part of a pair, for part `part` of a fused layer."""

    part: int
    scale: float
    a: Tensor  # [rank, local inputs]
    b: Tensor  # [rank, local outputs], transposed: in this order kernels read it


def pair_bytes(shard: WeightShard, max_rank: int, item: int) -> int:
    """Return the bytes of the memory of a layer's pairs in one slot. `item`: bytes of an element."""
    return (len(shard.parts) * shard.local_inputs + shard.rows) * max_rank * item


class LayerPairs:
    """The pairs of one linear layer in all slots, from slot 1 on."""

    def __init__(self, shard: WeightShard, slots: int, max_rank: int, placement: Placement) -> None:
        """Allocate memory for `slots` pairs of each part of `shard`, filled with zeros."""
        self.shard, self.max_rank = shard, max_rank
        self.outputs = [part.count for part in shard.parts]
        parts, dtype, device = len(shard.parts), placement.dtype, placement.device
        self.a = torch.zeros((slots, parts, max_rank, shard.local_inputs), dtype=dtype, device=device)
        self.b = torch.zeros((slots, max_rank, shard.rows), dtype=dtype, device=device)  # transposed
        self.scales = torch.zeros((slots, parts), device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32)  # highest rank of a slot's pairs
        self._ends = torch.tensor(self.outputs, dtype=torch.int64).cumsum(0)
        self._ends[-1] = shard.rows  # a padded last part
        at = (each.data_ptr() for each in (self.a, self.b, self.scales, self.ranks, self._ends))
        sizes = parts, max_rank, shard.local_inputs, shard.rows, shard.slices
        self.structure = CAdapterPairs(*at, *sizes)  # read by kernels on the CPU
        self.used: Set[int] = frozenset()  # slots that have a pair of this layer
        self._wide = torch.float64 if placement.device.type == "cpu" else torch.float32

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    @torch.inference_mode()
    def put(self, slot: int, pairs: Sequence[RankPair]) -> None:
        """Replace the pairs of `slot`. Parts without a pair are not adapted."""
        at, rank = slot - 1, max((len(pair.a) for pair in pairs), default=0)
        held = max(rank, int(self.ranks[at]))  # memory beyond is zero
        self.a[at, :, :held].zero_()
        self.b[at, :held].zero_()
        self.scales[at].zero_()
        for pair in pairs:
            own, first = len(pair.a), sum(self.outputs[: pair.part])
            self.a[at, pair.part, :own].copy_(pair.a, non_blocking=True)
            self.b[at, :own, first : first + pair.b.shape[1]].copy_(pair.b, non_blocking=True)
            self.scales[at, pair.part] = pair.scale
        self.ranks[at] = rank
        self.used = self.used | {slot} if pairs else self.used - {slot}

    def shrink(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return this rank's part of `A x` of the adapted rows of `x` [T, inputs]: float32 [n, parts, max rank]."""
        chosen = x.index_select(0, rows.rows).to(self._wide)
        sums = torch.empty((len(chosen), self.a.shape[1] * self.max_rank), device=x.device)
        for slot, start, stop in rows.spans:
            halves = self.a[slot - 1].flatten(0, 1).to(self._wide).chunk(self.shard.slices, 1)
            inputs = chosen[start:stop].chunk(self.shard.slices, 1)
            sums[start:stop] = tree_sum([(x @ a.T).float() for x, a in zip(inputs, halves, strict=True)])
        return sums.unflatten(1, (-1, self.max_rank))

    def columns(self, numbers: Tensor, rows: RowsBySlot) -> Tensor:
        """Return A's columns `numbers` int64 [n], a column for each adapted row: float32 [n, parts, max rank]."""
        found = [self.a[slot - 1][:, :, numbers[start:stop]] for slot, start, stop in rows.spans]
        return torch.cat(found, 2).permute(2, 0, 1).float()

    def expand(self, sums: Tensor, rows: RowsBySlot) -> Tensor:
        """Return `scale * B sums` of the adapted rows: float32 [n, local outputs].

        `sums`: the result of `shrink`, added over the ranks that share the inputs.
        """
        update = torch.zeros((len(sums), self.b.shape[2]), device=sums.device)
        for slot, start, stop in rows.spans:
            scaled = (sums[start:stop] * self.scales[slot - 1].unsqueeze(1)).to(self._wide)
            first = 0
            for part, count in enumerate(self.outputs):
                b = self.b[slot - 1, :, first : first + count].to(self._wide)
                update[start:stop, first : first + count] = (scaled[:, part] @ b).float()
                first += count
        return update

    def update(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return `scale * B (A x)` of the adapted rows, of a layer whose inputs are not shared: float32 [n, outputs].

        `x` [T, inputs] has all rows of the step.
        """
        return self.expand(self.shrink(x, rows), rows)
