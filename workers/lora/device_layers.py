"""Linear layers of a step in which some rows have adapters, on a device with Triton kernels.

Each call multiplies as the layer does, with float32 sums, and launches two more kernels: `A x`, and the update together
with the operations that finish the sums. The classes in `adapted_layers.py` are the reference. No call reads the
device, and every layer runs in the same way for any content of the slots, so graphs can record the calls.
"""

import torch
from torch import Tensor

from oarlock.workers.attention.blocks_by_slot import BlocksBySlot
from oarlock.workers.attention.rows_by_slot import StepRows
from oarlock.workers.layers.embedding import VocabParallelEmbedding
from oarlock.workers.layers.linear import ColumnParallelLinear, GatedParallelLinear, RowParallelLinear
from oarlock.workers.lora.adapted_layers import ColumnLayer
from oarlock.workers.lora.device_pairs import DevicePairs
from oarlock.workers.quantization.matmul import activated_rows
from oarlock.workers.quantization.unrounded import float32_sums
from oarlock.workers.quantization.weight_only import merged


class _DeviceLayer:
    """Base of all kinds: the pairs of a layer and the rows of the step that runs."""

    def __init__(self, pairs: DevicePairs, step: StepRows) -> None:
        self.pairs, self.step = pairs, step

    @property
    def rows(self) -> BlocksBySlot | None:
        """All rows of the step that runs, whether or not a slot adapts this layer; None in steps without adapters."""
        rows = self.step.current
        assert rows is None or isinstance(rows, BlocksBySlot), "rows of a step on the host"
        return rows


class DeviceColumnLayer(_DeviceLayer):
    """A layer whose outputs are divided among ranks: x [T, inputs] -> [T, local outputs]. For the output head these are
    rows of logits, neither scaled nor capped yet."""

    def __init__(self, layer: ColumnLayer, pairs: DevicePairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self._sums = float32_sums(layer.matmul)
        self._gate = layer.activation if isinstance(layer, GatedParallelLinear) else ""
        self._activation = layer.activation if isinstance(layer, ColumnParallelLinear) else None
        inputs = torch.zeros((1, pairs.shard.local_inputs), dtype=layer.placement.dtype, device=layer.placement.device)
        self._dtype = layer.matmul(inputs).dtype  # dtype of results

    def __call__(self, x: Tensor, rows: BlocksBySlot) -> Tensor:
        sums, low = self._sums(x), self.pairs.low_rank(x, rows)
        if self._activation is None:
            return self.pairs.finish(sums, low, rows, self._dtype, gate=self._gate)
        return activated_rows(self.pairs.finish(sums, low, rows, sums.dtype), self._activation, self._dtype)


class DeviceRowLayer(_DeviceLayer):
    """A layer whose inputs are divided among ranks: x [T, local inputs] -> [T, outputs], plus the residual.

    Ranks exchange `A x` together with the partial sums, in the dtype in which they exchange these without adapters.
    """

    def __init__(self, layer: RowParallelLinear, pairs: DevicePairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self._layer, self._is_shared = layer, layer.placement.tp.size > 1
        self._sums = layer.matmul if self._is_shared else float32_sums(layer.matmul)

    def __call__(self, x: Tensor, rows: BlocksBySlot, residual: Tensor | None = None) -> Tensor:
        return self.pairs.finish(*self._total(x, rows), rows, x.dtype, residual)

    def total(self, x: Tensor, rows: BlocksBySlot) -> Tensor:
        """Return the output before the residual is added: [T, outputs], rounded as without adapters."""
        sums, low = self._total(x, rows)
        return self.pairs.finish(sums, low, rows, sums.dtype if self._is_shared else x.dtype)

    def _total(self, x: Tensor, rows: BlocksBySlot) -> tuple[Tensor, Tensor]:
        """Return the all-reduced sums [T, outputs] with the bias, and the all-reduced `A x` [spans, T, max rank]."""
        sums, low = self._sums(x), self.pairs.low_rank(x, rows)
        if not self._is_shared:
            return sums, low
        low = merged(low, None, None, sums.dtype)  # spans are added in order, and rounded if the sums are
        both = self._layer.placement.tp.all_reduce(torch.cat((sums.flatten(), low.flatten())))
        sums, low = both[: sums.numel()].view_as(sums), both[sums.numel() :].view_as(low)
        return (sums if self._layer.bias is None else sums + self._layer.bias), low.unsqueeze(0)


class DeviceEmbedding(_DeviceLayer):
    """Embedding: ids int64 [T] and their rows [T, hidden], before the scale -> the rows with updates."""

    def __init__(self, layer: VocabParallelEmbedding, pairs: DevicePairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self._start, self._tp = layer.start, layer.placement.tp

    def __call__(self, ids: Tensor, found: Tensor, rows: BlocksBySlot) -> Tensor:
        low = self.pairs.low_rank_of_ids(ids, self._start, rows)
        if self._tp.size > 1:
            low = self._tp.all_reduce(low)  # exact: only one rank has values other than zero
        return self.pairs.finish(found, low.unsqueeze(0), rows, found.dtype)
