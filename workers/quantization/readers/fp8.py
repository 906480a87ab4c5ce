"""Reads weights in float8 with a scale for a tensor, for each output or for each block."""

import torch
from torch import Tensor

from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.method import Empty, WeightShard
from oarlock.workers.quantization.readers.grouped_method import Span, StoredPart, regroup, take_block
from oarlock.workers.quantization.readers.integers import take_scales
from oarlock.workers.quantization.unquantized import DenseWeight
from oarlock.workers.weights.source import WeightSource


class FP8LinearMethod:
    """`LinearMethod` of `weight` float8 [N, K] and its scales."""

    def __init__(self, scale: str, block: tuple[int, int | None] | None, *, rounds_rows: bool) -> None:
        """`scale`: the tensor of scales, by what follows the module's name. `block`: outputs and inputs that share one,
        None for all of them. `rounds_rows`: of inputs, as the checkpoint means it."""
        self._rounds_rows = rounds_rows
        self._scale = scale
        self._height, self._width = (None, None) if block is None else block

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> Fp8Weight:
        values = torch.zeros((shard.rows, shard.local_inputs), dtype=torch.float8_e4m3fn)
        inputs = Span(shard.first_input, shard.first_input + shard.local_inputs)
        groups = torch.arange(shard.inputs) // (self._width or shard.inputs)  # [K]
        form = regroup(groups, shard.all_slices, slice(inputs.first, inputs.stop), least=1)
        here = Span(int(groups[inputs.first]), int(groups[inputs.stop - 1]) + 1)
        scales = torch.zeros((shard.rows, len(form.group_of)))
        row = 0
        for name, rows, first, view in shard.sources(weights, "weight", values):
            part = StoredPart(name, rows, shard.inputs, Span(first, first + len(view)), inputs)
            view.copy_(take_block(weights, f"{name}.weight", (rows, shard.inputs), part.rows, inputs, values.dtype))
            found = self._scales(weights, part, here)  # [N, groups]
            scales[row : row + len(view)] = found[:, form.group_of - here.first]
            row += len(view)
        return Fp8Weight(values, scales, form.group, empty(0).dtype, rounds_rows=self._rounds_rows)

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """As `QuantisedLinearMethod.dequantised`."""
        into = empty(shard.rows, shard.local_inputs)
        into.copy_(self.load(shard, weights, empty).dequantised())
        return DenseWeight(into)

    def _scales(self, weights: WeightSource, part: StoredPart, groups: Span) -> Tensor:
        """float32 [N, groups]."""
        if self._height in (None, 1):
            return take_scales(weights, part, groups, self._scale)
        height, width = self._height, self._width or part.all_inputs
        shape = (-(-part.all_rows // height), -(-part.all_inputs // width))
        blocks = part.rows.of_words(height)
        found = take_block(weights, f"{part.name}.{self._scale}", shape, blocks, groups, torch.float32)
        return found.repeat_interleave(height, 0)[part.rows.within_words(height)]
