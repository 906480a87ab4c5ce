"""Linear layers of a step in which some rows have adapters. Each kind replaces the call of its layer in such steps.

These classes compute with torch, and are the reference of the C++ operations (`cpp_layers.py`), which serve on the CPU.

An update is added to the layer's float32 sums, after the bias and before the activation, the residual and the rounding,
as if the weight had been merged. Rows without an adapter of the layer keep the bits that they have in a step without
adapters: they are computed by the layer's own matmul, or their all-reduced sums are finished by the same operations.
"""

from collections.abc import Callable, Set

import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot, StepRows
from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.linear import (
    ColumnParallelLinear,
    GatedParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from oarlock.workers.lora.low_rank import LayerPairs
from oarlock.workers.quantization.matmul import ACTIVATIONS, activated_rows
from oarlock.workers.quantization.unrounded import float32_sums

ColumnLayer = QKVParallelLinear | ColumnParallelLinear | GatedParallelLinear | VocabParallelHead


class Adapted:
    """Base of all kinds: the pairs of a layer and the rows of the step that runs."""

    def __init__(self, pairs: LayerPairs, step: StepRows) -> None:
        self.pairs, self.step = pairs, step

    @property
    def rows(self) -> RowsBySlot | None:
        """The rows of the step that have an adapter of this layer; None if there are none."""
        return adapted_rows(self.step, self.pairs.used)


def adapted_rows(step: StepRows, used: Set[int]) -> RowsBySlot | None:
    """Return the rows of the step that runs whose slots are among `used`, or None if there are none."""
    if step.current is None or not used:
        return None
    assert isinstance(step.current, RowsBySlot), "rows of a step on a device"
    return step.current.among(used)


class AdaptedColumnLayer(Adapted):
    """A layer whose outputs are divided among ranks: x [T, inputs] -> [T, local outputs]. For the
    output head these are rows of logits, neither scaled nor capped yet."""

    def __init__(self, layer: ColumnLayer, pairs: LayerPairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self.multiply = layer.matmul
        self.sums = float32_sums(layer.matmul)
        self.finish = _finish(layer)
        inputs = torch.zeros((1, pairs.shard.local_inputs), dtype=layer.placement.dtype, device=layer.placement.device)
        self.dtype = layer.matmul(inputs).dtype  # dtype of results

    def __call__(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        chosen = x.index_select(0, rows.rows)
        adapted = self.finish(self.sums(chosen) + self.pairs.update(x, rows)).to(self.dtype)
        if not len(rows.others):
            return torch.empty_like(adapted).index_copy_(0, rows.rows, adapted)
        others = self.multiply(x.index_select(0, rows.others))
        y = others.new_empty((len(x), others.shape[1]))
        return y.index_copy_(0, rows.others, others).index_copy_(0, rows.rows, adapted)


def _finish(layer: ColumnLayer) -> Callable[[Tensor], Tensor]:
    """Return the function of float32 sums that the layer applies before it rounds."""
    if isinstance(layer, GatedParallelLinear):
        function = ACTIVATIONS[layer.activation].function

        def gate(sums: Tensor) -> Tensor:
            # float64 hides the differences between torch's exponential functions: see `activated_with_torch`.
            one, up = sums.double().chunk(2, 1)
            return function(one).float() * up.float()

        return gate
    if isinstance(layer, ColumnParallelLinear) and layer.activation is not None:
        activation = layer.activation
        return lambda sums: activated_rows(sums, activation, torch.float32)
    return lambda sums: sums


class AdaptedRowLayer(Adapted):
    """A layer whose inputs are divided among ranks: x [T, local inputs] -> [T, outputs], plus the residual."""

    def __init__(self, layer: RowParallelLinear, pairs: LayerPairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self.layer = layer
        self.sums = float32_sums(layer.matmul)

    def __call__(self, x: Tensor, rows: RowsBySlot, residual: Tensor | None = None) -> Tensor:
        total = self.total(x, rows)
        y = (total if residual is None else total + residual).to(x.dtype)
        if len(rows.others) and self.layer.placement.tp.size == 1:  # libraries add the residual before they round
            others = (part.index_select(0, rows.others) for part in (x, residual) if part is not None)
            y.index_copy_(0, rows.others, self.layer.matmul(*others))
        return y

    def total(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        """Return the output before the residual is added, unrounded: float32 [T, outputs]."""
        tp, bias = self.layer.placement.tp, self.layer.bias
        partial, low = self.sums(x), self.pairs.shrink(x, rows)
        if tp.size > 1:
            both = tp.all_reduce(torch.cat((partial.flatten(), low.flatten())))
            partial = both[: partial.numel()].view_as(partial)
            low = both[partial.numel() :].view_as(low)
            partial = partial if bias is None else partial + bias
        return partial.index_add(0, rows.rows, self.pairs.expand(low, rows))


class AdaptedEmbedding(Adapted):
    """Embedding: ids int64 [T] and their rows [T, hidden], before the scale -> the adapted rows."""

    def __init__(self, layer: VocabParallelEmbedding, pairs: LayerPairs, step: StepRows) -> None:
        super().__init__(pairs, step)
        self.layer = layer

    def __call__(self, ids: Tensor, found: Tensor, rows: RowsBySlot) -> Tensor:
        layer = self.layer
        local = ids[rows.rows] - layer.start
        elsewhere = (local < 0) | (local >= layer.local)
        low = self.pairs.columns(local.masked_fill(elsewhere, 0), rows)
        if layer.placement.tp.size > 1:
            low = layer.placement.tp.all_reduce(low.masked_fill_(elsewhere.view(-1, 1, 1), 0.0))
        adapted = (found[rows.rows].float() + self.pairs.expand(low, rows)).to(found.dtype)
        return found.index_copy(0, rows.rows, adapted)
