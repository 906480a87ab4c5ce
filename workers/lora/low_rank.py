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
from oarlock.workers.lora import pair_layout
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
        self.is_packed = False  # whether the memory has the order of `pair_layout`, which kernels on the CPU read
        self._block = pair_layout.block_of(shard.local_inputs // shard.slices)
        self.scales = torch.zeros((slots, parts), device=device)
        self.ranks = torch.zeros(slots, dtype=torch.int32)  # highest rank of a slot's pairs
        self._ends = torch.tensor(self.outputs, dtype=torch.int64).cumsum(0)
        self._ends[-1] = shard.rows  # a padded last part
        at = (each.data_ptr() for each in (self.a, self.b, self.scales, self.ranks, self._ends))
        sizes = parts, max_rank, shard.local_inputs, shard.rows, shard.slices
        self.structure = CAdapterPairs(*at, *sizes, self._block, pair_layout.PANEL)
        self.used: Set[int] = frozenset()  # slots that have a pair of this layer
        self._wide = torch.float64 if placement.device.type == "cpu" else torch.float32

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def pack(self) -> None:
        """Store pairs from now on in the order in which kernels on the CPU read them."""
        for slot in () if self.is_packed else self.used:
            at, a, b = slot - 1, self.a_of(slot).clone(), self.b_of(slot).clone()
            for part, one in enumerate(a):
                pair_layout.store_a(self.a[at, part], one, self._block)
            pair_layout.store_b(self.b[at], b)
        self.is_packed = True

    @torch.inference_mode()
    def put(self, slot: int, pairs: Sequence[RankPair]) -> None:
        """Replace the pairs of `slot`. Parts without a pair are not adapted."""
        at, rank = slot - 1, max((len(pair.a) for pair in pairs), default=0)
        held = max(rank, int(self.ranks[at]))  # memory beyond is zero
        whole = self.b.new_zeros((held, self.shard.rows)) if self.is_packed else self.b[at, :held].zero_()
        self.scales[at].zero_()
        for part in range(len(self.outputs)):
            self._put_a(at, part, held, next((pair.a for pair in pairs if pair.part == part), None))
        for pair in pairs:
            first = sum(self.outputs[: pair.part])
            whole[: len(pair.b), first : first + pair.b.shape[1]].copy_(pair.b, non_blocking=True)
            self.scales[at, pair.part] = pair.scale
        if self.is_packed:
            pair_layout.store_b(self.b[at], whole)
        self.ranks[at] = rank
        self.used = self.used | {slot} if pairs else self.used - {slot}

    def _put_a(self, at: int, part: int, held: int, a: Tensor | None) -> None:
        """Replace the first `held` rows of A of a part by `a` [rank, inputs], and zeros."""
        own = 0 if a is None else len(a)
        if not self.is_packed:
            self.a[at, part, own:held].zero_()
            if a is not None:
                self.a[at, part, :own].copy_(a, non_blocking=True)
        elif a is not None and own == held:
            pair_layout.store_a(self.a[at, part], a, self._block)
        elif held:
            whole = self.a.new_zeros((held, self.a.shape[3]))
            if a is not None:
                whole[:own] = a
            pair_layout.store_a(self.a[at, part], whole, self._block)

    def a_of(self, slot: int) -> Tensor:
        """Return A of all parts of a slot: [parts, max rank, inputs]."""
        stored = self.a[slot - 1]
        if not self.is_packed:
            return stored
        return torch.stack([pair_layout.read_a(one, self._block) for one in stored])

    def b_of(self, slot: int) -> Tensor:
        """Return B of a slot, transposed: [max rank, outputs]."""
        stored = self.b[slot - 1]
        return pair_layout.read_b(stored) if self.is_packed else stored

    def shrink(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return this rank's part of `A x` of the adapted rows of `x` [T, inputs]: float32 [n, parts, max rank]."""
        return tree_sum(list(self.shrink_slices(x, rows)))

    def shrink_slices(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return the part of `shrink` that each slice of the inputs has: float32 [slices, n, parts, max rank]."""
        chosen, slices = x.index_select(0, rows.rows).to(self._wide), self.shard.slices
        sums = torch.empty((slices, len(chosen), self.a.shape[1] * self.max_rank), device=x.device)
        for slot, start, stop in rows.spans:
            halves = self.a_of(slot).flatten(0, 1).to(self._wide).chunk(slices, 1)
            inputs = chosen[start:stop].chunk(slices, 1)
            for number, (part, a) in enumerate(zip(inputs, halves, strict=True)):
                sums[number, start:stop] = (part @ a.T).float()
        return sums.unflatten(2, (-1, self.max_rank))

    def columns(self, numbers: Tensor, rows: RowsBySlot) -> Tensor:
        """Return A's columns `numbers` int64 [n], a column for each adapted row: float32 [n, parts, max rank]."""
        found = [self.a_of(slot)[:, :, numbers[start:stop]] for slot, start, stop in rows.spans]
        return torch.cat(found, 2).permute(2, 0, 1).float()

    def expand(self, sums: Tensor, rows: RowsBySlot) -> Tensor:
        """Return `scale * B sums` of the adapted rows: float32 [..., n, local outputs].

        `sums` [..., n, parts, max rank]: the result of `shrink`, added over the ranks that share the inputs.
        """
        update = torch.zeros((*sums.shape[:-2], self.b.shape[2]), device=sums.device)
        for slot, start, stop in rows.spans:
            scaled = (sums[..., start:stop, :, :] * self.scales[slot - 1].unsqueeze(1)).to(self._wide)
            first, whole = 0, self.b_of(slot)
            for part, count in enumerate(self.outputs):
                b = whole[:, first : first + count].to(self._wide)
                update[..., start:stop, first : first + count] = (scaled[..., part, :] @ b).float()
                first += count
        return update

    def update(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return `scale * B (A x)` of the adapted rows, of a layer whose inputs are not shared: float32 [n, outputs].

        `x` [T, inputs] has all rows of the step.
        """
        return self.expand(self.shrink(x, rows), rows)
