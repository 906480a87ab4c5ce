"""Reads weights of blocks from GGUF files."""

import torch

from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.groups import group_of_blocks
from oarlock.workers.quantization.method import Empty, LinearWeight, WeightShard
from oarlock.workers.quantization.unquantized import DenseWeight, UnquantizedLinearMethod
from oarlock.workers.weights.gguf_header import GroupForm
from oarlock.workers.weights.gguf_reader import GGUFReader, Groups
from oarlock.workers.weights.source import WeightSource


class GGUFLinearMethod:
    """`LinearMethod` of weights of blocks."""

    def __init__(self, form: GroupForm) -> None:
        self._form = form

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        assert isinstance(weights, GGUFReader), "only a GGUF file has weights of this form"
        form = self._form
        group = group_of_blocks(form.group, shard.local_inputs, shard.slices)
        if group is None:
            return self.dequantised(shard, weights, empty)
        groups = Groups.empty(shard.rows, shard.local_inputs, group, offsets=form.has_offsets)
        first = 0
        for name, rows, start, view in shard.sources(weights, "weight", torch.empty((shard.rows, 0))):
            weights.take_groups(
                f"{name}.weight",
                groups.rows(first, len(view)),
                shape=(rows, shard.inputs),
                first_row=start,
                first_input=shard.first_input,
            )
            first += len(view)
        if shard.padding:
            groups.values[first:] = 0
            groups.scales[first:] = 0.0
        return GroupedWeight(
            groups.values, groups.scales, group, empty(0).dtype, offsets=groups.offsets, bits=form.bits
        )

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """As `QuantisedLinearMethod.dequantised`."""
        return UnquantizedLinearMethod().load(shard, weights, empty)
