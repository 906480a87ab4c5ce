"""Reads weights of whole numbers with a scale, and perhaps a zero, for each group of inputs."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.layers.quantization.grouped import GroupedWeight
from workers.layers.quantization.method import LinearWeight
from workers.layers.quantization.readers.regroup import Regrouped, regroup
from workers.layers.quantization.readers.words import Span
from workers.layers.quantization.shard import Empty, WeightShard
from workers.layers.quantization.stacked import StackedWeight
from workers.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Numbers:
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g], g the group of input k."""

    values: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, groups]
    zeros: Tensor | None  # int8 [N, groups]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Some rows and columns of the weight [all_rows, all_inputs] of the module `name`."""

    name: str
    all_rows: int
    all_inputs: int
    rows: Span
    inputs: Span


class GroupReader(Protocol):
    """How one format stores numbers, scales and zeros."""

    bits: int
    kind: str  # what follows a module's name where its weight is stored

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        """Of each input of the whole model: int64 [all_inputs]."""

    def numbers(self, weights: WeightSource, part: StoredPart, groups: Span) -> Numbers:
        """Of some rows and inputs, with the scales and zeros of some groups."""


class GroupedLinearMethod:
    """`LinearMethod` of weights that a `GroupReader` reads."""

    def __init__(self, reader: GroupReader) -> None:
        self._reader = reader

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        none = torch.empty((shard.rows, 0))
        parts = [
            StoredPart(name, rows, shard.inputs, Span(first, first + len(view)), _inputs_of(shard))
            for name, rows, first, view in shard.sources(weights, self._reader.kind, none)
        ]
        groups = [self._reader.groups(weights, part.name, shard.inputs) for part in parts]
        dtype = empty(0).dtype
        if all(torch.equal(other, groups[0]) for other in groups):
            return self._weight(parts, groups[0], shard, weights, dtype)
        # Parts whose inputs are grouped in orders of their own have no common order.
        assert not shard.padding
        loaded = [
            self._weight([part], own, own_shard, weights, dtype)
            for part, own, own_shard in zip(parts, groups, shard.separate(), strict=True)
        ]
        return StackedWeight(loaded, [len(part.rows) for part in parts])

    def _weight(
        self, parts: list[StoredPart], groups: Tensor, shard: WeightShard, weights: WeightSource, dtype: torch.dtype
    ) -> GroupedWeight:
        here = slice(shard.first_input, shard.first_input + shard.local_inputs)
        form = regroup(groups, shard.all_slices, here)
        span = Span(int(groups[here].min()), int(groups[here].max()) + 1)
        found = [_arranged(self._reader.numbers(weights, part, span), form, span.first) for part in parts]
        values, scales = torch.cat([part.values for part in found]), torch.cat([part.scales for part in found])
        offsets = None
        if any(part.zeros is not None for part in found):
            zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros.float() for part in found]
            offsets = torch.cat(zeros).neg_().mul_(scales)
        if shard.padding:
            values, scales = (F.pad(x, (0, 0, 0, shard.padding)) for x in (values, scales))
            offsets = None if offsets is None else F.pad(offsets, (0, 0, 0, shard.padding))
        bits, order = self._reader.bits, form.inputs
        return GroupedWeight(values, scales, form.group, dtype, offsets=offsets, bits=bits, order=order)


def _inputs_of(shard: WeightShard) -> Span:
    return Span(shard.first_input, shard.first_input + shard.local_inputs)


def _arranged(numbers: Numbers, form: Regrouped, first_group: int) -> Numbers:
    """In pieces of equal length. What fills them up is the number that means zero."""
    group_of = form.group_of - first_group  # [pieces]
    scales = numbers.scales[:, group_of]
    zeros = None if numbers.zeros is None else numbers.zeros[:, group_of]
    if form.inputs is None or form.filled_up is None:
        return Numbers(numbers.values, scales, zeros)
    values = numbers.values[:, form.inputs]
    nowhere = form.filled_up.nonzero().flatten()
    values[:, nowhere] = 0 if zeros is None else zeros[:, nowhere // form.group]
    return Numbers(values, scales, zeros)
