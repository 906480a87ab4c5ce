"""Reads weights of blocks from GGUF files."""

import math

import torch

from workers.layers.quantization.grouped import GroupedWeight
from workers.layers.quantization.method import LinearWeight
from workers.layers.quantization.shard import Empty, WeightShard
from workers.layers.quantization.unquantized import UnquantizedLinearMethod
from workers.weights.gguf.block_types import GroupForm
from workers.weights.gguf.blocks import Groups
from workers.weights.gguf.reader import GGUFReader
from workers.weights.source import WeightSource

_LEAST = 16  # inputs of a group, in products


class GGUFLinearMethod:
    """`LinearMethod` of weights of blocks."""

    def __init__(self, form: GroupForm) -> None:
        self._form = form

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        assert isinstance(weights, GGUFReader), "only a GGUF file has weights of this form"
        form = self._form
        # Groups begin anew at each slice, so that the bits are the same at every number of ranks.
        slice_inputs = shard.inputs // shard.all_slices
        group = form.group if shard.all_slices == 1 else math.gcd(form.group, slice_inputs)
        group = math.gcd(group, shard.first_input)
        if group % _LEAST:  # no model that is known: a rank's border within 16 inputs
            return UnquantizedLinearMethod().load(shard, weights, empty)
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
