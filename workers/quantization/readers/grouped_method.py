"""Reads weights of whole numbers with a scale, and perhaps a zero, for each group of inputs."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.method import LinearWeight
from oarlock.workers.quantization.readers.regroup import Regrouped, regroup
from oarlock.workers.quantization.readers.words import Span
from oarlock.workers.quantization.shard import Empty, WeightShard
from oarlock.workers.quantization.stacked import StackedWeight
from oarlock.workers.quantization.unquantized import DenseWeight
from oarlock.workers.weights.source import WeightSource

_ROWS_AT_ONCE = 1024  # of a weight, in float32


@dataclass(frozen=True, slots=True)
class Numbers:
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g], g the group of input k."""

    values: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, groups]
    zeros: Tensor | None  # int8 [N, groups]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Part of the weight [all_rows, all_inputs] of the module `name`: some of its rows and inputs."""

    name: str
    all_rows: int
    all_inputs: int
    rows: Span
    inputs: Span


class GroupReader(Protocol):
    """Reader of the numbers, scales and zeros of one format."""

    bits: int
    kind: str  # what follows a module's name where its weight is stored

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        """The group of each input of the whole model: int64 [all_inputs]."""

    def numbers(self, weights: WeightSource, part: StoredPart, groups: Span) -> Numbers:
        """Numbers of some rows and inputs, with the scales and zeros of some groups."""


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

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """As `QuantisedLinearMethod.dequantised`."""
        into = empty(shard.rows, shard.local_inputs)
        into[shard.rows - shard.padding :] = 0.0
        inputs = _inputs_of(shard)
        for name, rows, first, view in shard.sources(weights, self._reader.kind, into):
            groups = self._reader.groups(weights, name, shard.inputs)[inputs.first : inputs.stop]
            span = Span(int(groups.min()), int(groups.max()) + 1)
            part = StoredPart(name, rows, shard.inputs, Span(first, first + len(view)), inputs)
            _write_out(self._reader.numbers(weights, part, span), groups - span.first, view)
        return DenseWeight(into)

    def _weight(
        self, parts: list[StoredPart], groups: Tensor, shard: WeightShard, weights: WeightSource, dtype: torch.dtype
    ) -> LinearWeight:
        here = slice(shard.first_input, shard.first_input + shard.local_inputs)
        span = Span(int(groups[here].min()), int(groups[here].max()) + 1)
        found = [self._reader.numbers(weights, part, span) for part in parts]
        if self._reader.bits == 8 and not groups.any() and all(part.zeros is None for part in found):
            values, scales = (
                _stacked([part.values for part in found], shard),
                _stacked([p.scales for p in found], shard),
            )
            return Int8Weight(values, scales.squeeze(1), dtype)
        form = regroup(groups, shard.all_slices, here)
        found = [_arranged(part, form, span.first) for part in found]
        values, scales = _stacked([part.values for part in found], shard), _stacked([p.scales for p in found], shard)
        offsets = None
        if any(part.zeros is not None for part in found):
            zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros.float() for part in found]
            offsets = _stacked(zeros, shard).neg_().mul_(scales)
        bits, order = self._reader.bits, form.inputs
        return GroupedWeight(values, scales, form.group, dtype, offsets=offsets, bits=bits, order=order)


def _write_out(numbers: Numbers, groups: Tensor, into: Tensor) -> None:
    """`groups` int64 [K]: of each input. `into` [N, K], in any dtype of floating point."""
    for row in range(0, len(into), _ROWS_AT_ONCE):
        rows = slice(row, row + _ROWS_AT_ONCE)
        values = numbers.values[rows].float()
        if numbers.zeros is not None:
            values -= numbers.zeros[rows].float()[:, groups]
        into[rows] = values.mul_(numbers.scales[rows][:, groups])


def _stacked(parts: list[Tensor], shard: WeightShard) -> Tensor:
    """One above the other, with the shard's rows of zeros below."""
    whole = torch.cat(parts)
    return F.pad(whole, (0, 0, 0, shard.padding)) if shard.padding else whole


def _inputs_of(shard: WeightShard) -> Span:
    return Span(shard.first_input, shard.first_input + shard.local_inputs)


def _arranged(numbers: Numbers, form: Regrouped, first_group: int) -> Numbers:
    """Arranges numbers in pieces of equal length, filled up with the number that means zero."""
    group_of = form.group_of - first_group  # [pieces]
    scales = numbers.scales[:, group_of]
    zeros = None if numbers.zeros is None else numbers.zeros[:, group_of]
    if form.inputs is None or form.filled_up is None:
        return Numbers(numbers.values, scales, zeros)
    values = numbers.values[:, form.inputs]
    nowhere = form.filled_up.nonzero().flatten()
    values[:, nowhere] = 0 if zeros is None else zeros[:, nowhere // form.group]
    return Numbers(values, scales, zeros)
