"""Weights of whole numbers with a scale, and perhaps a zero, for each group of inputs, arranged for their products.

Groups of one scale should lie in one piece, and in equal pieces. In most checkpoints they do already, but for a group
that the border of a slice cuts: then all groups are cut into pieces of their greatest common length, so that every
number of ranks adds the same pieces up. With act-order the inputs of a group are scattered: they are sorted by group
within each slice, and a group's last piece is filled up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.errors import StartupError
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.method import Empty, LinearWeight, WeightShard
from oarlock.workers.quantization.stacked import StackedWeight
from oarlock.workers.quantization.unquantized import DenseWeight
from oarlock.workers.weights.source import WeightSource

LEAST = 16  # inputs: the shortest piece that products take


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A rank's inputs in pieces of `group` inputs."""

    group: int
    group_of: Tensor  # int64 [pieces]: the stored group of each
    inputs: Tensor | None = None  # int64 [K']: which of the rank's inputs stands there; None: each in its own place
    filled_up: Tensor | None = None  # bool [K']: where that input only fills a piece up, with a weight of zero


def check_groups(tensor: str, groups: Tensor, count: int, size: int | None = None) -> None:
    """Raise `StartupError` unless `tensor`, whose numbers are `groups` [K], names groups below `count` alone, and with
    `size` each of them for so many inputs."""
    lowest, highest = int(groups.min()), int(groups.max())
    wrong = None
    if lowest < 0 or highest >= count:
        wrong = f"names group {lowest if lowest < 0 else highest} of {count}"
    elif size is not None:
        members = torch.bincount(groups, minlength=count)  # inputs of each group
        group = int((members != size).int().argmax())
        if members[group] != size:
            wrong = f"names group {group} for {int(members[group])} inputs, not {size}"
    if wrong is not None:
        raise StartupError(
            f"tensor '{tensor}' {wrong}.", "Download the checkpoint again, or use another quantisation of the model."
        )


def regroup(groups: Tensor, slices: int, here: slice, least: int = LEAST) -> Regrouped:
    """`groups` int64 [K]: the stored group of each input of the whole model, which are cut into `slices`.

    `here`: the inputs of this rank, whole slices. `least`: pieces have a multiple of so many inputs.
    """
    inputs = len(groups)
    length = inputs // slices
    begins = torch.cat((torch.tensor([True]), groups[1:] != groups[:-1]))  # [K]
    begins[::length] = True
    starts = begins.nonzero().flatten()
    group = math.gcd(*starts.tolist(), length if slices > 1 else 0)
    if len(starts) == 1:
        group = -(-inputs // least) * least  # one scale for all
    if group % least == 0:
        return Regrouped(group, groups[here][::group])
    return _sorted(groups, slices, here, least)


def _sorted(groups: Tensor, slices: int, here: slice, least: int) -> Regrouped:
    length = len(groups) // slices
    counts = torch.stack([torch.bincount(part, minlength=int(groups.max()) + 1) for part in groups.split(length)])
    group = math.gcd(*counts[counts > 0].tolist())
    group = group if group % least == 0 else least
    pieces = -(-counts // group)  # [slices, groups]
    longest = int(pieces.sum(1).max()) * group  # inputs of a slice, filled up
    inputs, filled_up, group_of = [], [], []
    for index in range(here.start // length, here.stop // length):
        order = torch.argsort(groups[index * length : (index + 1) * length], stable=True)
        first = index * length - here.start
        places, is_filled = torch.full((longest,), first), torch.ones(longest, dtype=torch.bool)
        ends = (pieces[index] * group).cumsum(0)
        for run, end, padded in zip(
            order.split(counts[index].tolist()), ends.tolist(), pieces[index].tolist(), strict=True
        ):
            start = end - padded * group
            places[start : start + len(run)] = run + first
            is_filled[start : start + len(run)] = False
        inputs.append(places)
        filled_up.append(is_filled)
        own = torch.repeat_interleave(torch.arange(len(ends)), pieces[index])
        group_of.append(torch.nn.functional.pad(own, (0, longest // group - len(own)), value=int(own[-1])))
    return Regrouped(group, torch.cat(group_of), torch.cat(inputs), torch.cat(filled_up))


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers `first` to `stop` of a row, or of a column."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def of_words(self, in_word: int) -> "Span":
        """The words of so many numbers that hold them."""
        return Span(self.first // in_word, -(-self.stop // in_word))

    def within_words(self, in_word: int) -> slice:
        """Place of these numbers within the words of `of_words`."""
        first = self.first % in_word
        return slice(first, first + len(self))


def take_block(
    weights: WeightSource, name: str, shape: Sequence[int], rows: Span, columns: Span, dtype: torch.dtype
) -> Tensor:
    """Reads some rows and columns of a stored matrix: [rows, columns]. No layer cuts a matrix along both."""
    height, width = shape
    if len(columns) == width:
        into = torch.empty((len(rows), width), dtype=dtype)
        weights.take(name, into, shape=shape, start=rows.first)
        return into
    into = torch.empty((height, len(columns)), dtype=dtype)
    weights.take(name, into, shape=shape, dim=1, start=columns.first)
    return into[rows.first : rows.stop]


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [R, C] -> int8: each word becomes 32 / `bits` numbers along `dim`, less 2 ** (bits - 1).

    `order`: the place of each number of a word, the lowest bits first; None: one after the other.
    """
    height, width = words.shape
    words = words.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps odd strides of lengths of one
    stored = words.view(torch.uint8).view(height, width, 4)  # the lowest byte first
    if bits == 8:
        numbers = (stored ^ 0x80).view(torch.int8)
        return numbers.flatten(1) if dim == 1 else numbers.transpose(1, 2).flatten(0, 1)
    halves = [(half.view(torch.int8) - 8) for half in (stored & 15, stored >> 4)]  # the lower one first
    if dim == 1 and order is None:
        return torch.stack(halves, 3).flatten(1)
    shape = (height, 8, width) if dim == 0 else (height, width, 8)
    numbers = torch.empty(shape, dtype=torch.int8)
    for index in range(8):
        place = index if order is None else order[index]
        numbers.select(dim + 1, place).copy_(halves[index % 2][:, :, index // 2])
    return numbers.flatten(dim, dim + 1)


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
