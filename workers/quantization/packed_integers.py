"""Readers of integer weights as AWQ, GPTQ and compressed-tensors store them, with n values in a 32-bit word.

AWQ                 `qweight` [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N]
GPTQ                `qweight` [K / n, N], `qzeros` [groups, N / n], `scales` [groups, N]
compressed-tensors  `weight_packed` [N, K / n] or `weight` int8 [N, K]; `weight_scale` of one value,
                    [N, 1] or [N, groups]; `weight_zero_point` of the same shape, packed along the outputs if the
                    weight is packed

A scale, and perhaps a zero point, belongs to a group of inputs. Kernels need contiguous groups of equal size. Most
checkpoints have such groups, except for a group that the border of a slice cuts: then all groups are cut into pieces of
their greatest common length, so that every number of ranks adds the same pieces up. With act-order the inputs of a
group are scattered: they are sorted by group within each slice, and a group's last piece is padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.int8 import Int8Weight
from oarlock.workers.quantization.method import DenseWeight, Empty, LinearWeight, StackedWeight, WeightShard
from oarlock.workers.weights.source import WeightSource

LEAST = 16  # inputs of the shortest piece that matmuls take
_ROWS_AT_ONCE = 1024  # rows of a weight dequantised at a time, in float32
_IN_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each value in a word
_NOT_SET = -1  # value of all inputs if a tool stored group indices without ordering the inputs


@dataclass(frozen=True, slots=True)
class Regrouped:
    """A rank's inputs in pieces of `group` inputs."""

    group: int
    group_of: Tensor  # int64 [pieces]: the stored group of each piece
    inputs: Tensor | None = None  # int64 [K']: index of the rank's input at each position; None: unchanged order
    filled_up: Tensor | None = None  # bool [K']: whether the position is padding, with a weight of zero


def check_groups(tensor: str, groups: Tensor, count: int, size: int | None = None) -> None:
    """Raise `StartupError` if `tensor`, with the values `groups` [K], names a group that is not below `count`.

    With `size`, also raise it if a group does not have `size` inputs.
    """
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
    """Regroup `groups`, int64 [K], the stored group of each input of the whole model, whose inputs are cut into
    `slices`.

    `here`: the inputs of this rank, whole slices. `least`: the inputs of each piece are a multiple of it.
    """
    inputs = len(groups)
    length = inputs // slices
    begins = torch.cat((torch.tensor([True]), groups[1:] != groups[:-1]))  # [K]
    begins[::length] = True
    starts = begins.nonzero().flatten()
    group = math.gcd(*starts.tolist(), length if slices > 1 else 0)
    if len(starts) == 1:
        group = -(-inputs // least) * least  # one scale for all inputs
    if group % least == 0:
        return Regrouped(group, groups[here][::group])
    return _sorted(groups, slices, here, least)


def _sorted(groups: Tensor, slices: int, here: slice, least: int) -> Regrouped:
    length = len(groups) // slices
    counts = torch.stack([torch.bincount(part, minlength=int(groups.max()) + 1) for part in groups.split(length)])
    group = math.gcd(*counts[counts > 0].tolist())
    group = group if group % least == 0 else least
    pieces = -(-counts // group)  # [slices, groups]
    longest = int(pieces.sum(1).max()) * group  # inputs of a slice, padded
    inputs, filled_up, group_of = [], [], []
    for index in range(here.start // length, here.stop // length):
        order = torch.argsort(groups[index * length : (index + 1) * length], stable=True)
        first = index * length - here.start
        positions, is_filled = torch.full((longest,), first), torch.ones(longest, dtype=torch.bool)
        ends = (pieces[index] * group).cumsum(0)
        for run, end, padded in zip(
            order.split(counts[index].tolist()), ends.tolist(), pieces[index].tolist(), strict=True
        ):
            start = end - padded * group
            positions[start : start + len(run)] = run + first
            is_filled[start : start + len(run)] = False
        inputs.append(positions)
        filled_up.append(is_filled)
        own = torch.repeat_interleave(torch.arange(len(ends)), pieces[index])
        group_of.append(torch.nn.functional.pad(own, (0, longest // group - len(own)), value=int(own[-1])))
    return Regrouped(group, torch.cat(group_of), torch.cat(inputs), torch.cat(filled_up))


@dataclass(frozen=True, slots=True)
class Span:
    """Values `first` to `stop` of a row or a column."""

    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def of_words(self, in_word: int) -> "Span":
        """Return the span of words, each of `in_word` values, that contain these values."""
        return Span(self.first // in_word, -(-self.stop // in_word))

    def within_words(self, in_word: int) -> slice:
        """Return the slice of these values within the words of `of_words`."""
        first = self.first % in_word
        return slice(first, first + len(self))


def take_block(
    weights: WeightSource, name: str, shape: Sequence[int], rows: Span, columns: Span, dtype: torch.dtype
) -> Tensor:
    """Read some rows and columns of a stored matrix: [rows, columns]. No layer cuts a matrix along both dimensions."""
    height, width = shape
    if len(columns) == width:
        into = torch.empty((len(rows), width), dtype=dtype)
        weights.take(name, into, shape=shape, start=rows.first)
        return into
    into = torch.empty((height, len(columns)), dtype=dtype)
    weights.take(name, into, shape=shape, dim=1, start=columns.first)
    return into[rows.first : rows.stop]


def unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack int32 [R, C] to int8: each word becomes 32 / `bits` values along `dim`, minus 2 ** (bits - 1).

    `order`: the index of each value of a word, the lowest bits first; None: consecutive.
    """
    height, width = words.shape
    words = words.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps odd strides of length-1 dimensions
    stored = words.view(torch.uint8).view(height, width, 4)  # the lowest byte first
    if bits == 8:
        numbers = (stored ^ 0x80).view(torch.int8)
        return numbers.flatten(1) if dim == 1 else numbers.transpose(1, 2).flatten(0, 1)
    halves = [(half.view(torch.int8) - 8) for half in (stored & 15, stored >> 4)]  # the lower half first
    if dim == 1 and order is None:
        return torch.stack(halves, 3).flatten(1)
    shape = (height, 8, width) if dim == 0 else (height, width, 8)
    numbers = torch.empty(shape, dtype=torch.int8)
    for index in range(8):
        position = index if order is None else order[index]
        numbers.select(dim + 1, position).copy_(halves[index % 2][:, :, index // 2])
    return numbers.flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class QuantizedValues:
    """weight[n, k] = (values[n, k] - zeros[n, g]) * scales[n, g], with g the group of input k."""

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
    """Reader of the values, scales and zero points of one format."""

    bits: int
    kind: str  # suffix of a stored weight after the module's name

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        """Return the group of each input of the whole model: int64 [all_inputs]."""

    def read(self, weights: WeightSource, part: StoredPart, groups: Span) -> QuantizedValues:
        """Return the values of some rows and inputs, with the scales and zero points of some groups."""


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
        # Parts whose inputs are grouped in different orders have no common order.
        assert not shard.padding
        loaded = [
            self._weight([part], own, own_shard, weights, dtype)
            for part, own, own_shard in zip(parts, groups, shard.separate(), strict=True)
        ]
        return StackedWeight(loaded, [len(part.rows) for part in parts])

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`."""
        into = empty(shard.rows, shard.local_inputs)
        into[shard.rows - shard.padding :] = 0.0
        inputs = _inputs_of(shard)
        for name, rows, first, view in shard.sources(weights, self._reader.kind, into):
            groups = self._reader.groups(weights, name, shard.inputs)[inputs.first : inputs.stop]
            span = Span(int(groups.min()), int(groups.max()) + 1)
            part = StoredPart(name, rows, shard.inputs, Span(first, first + len(view)), inputs)
            _write_out(self._reader.read(weights, part, span), groups - span.first, view)
        return DenseWeight(into)

    def _weight(
        self, parts: list[StoredPart], groups: Tensor, shard: WeightShard, weights: WeightSource, dtype: torch.dtype
    ) -> LinearWeight:
        here = slice(shard.first_input, shard.first_input + shard.local_inputs)
        span = Span(int(groups[here].min()), int(groups[here].max()) + 1)
        found = [self._reader.read(weights, part, span) for part in parts]
        if self._reader.bits == 8 and not groups.any() and all(part.zeros is None for part in found):
            values, scales = (
                _stacked([part.values for part in found], shard),
                _stacked([p.scales for p in found], shard),
            )
            return Int8Weight(values, scales.squeeze(1), dtype)
        weight_format = regroup(groups, shard.all_slices, here)
        found = [_arranged(part, weight_format, span.first) for part in found]
        values, scales = _stacked([part.values for part in found], shard), _stacked([p.scales for p in found], shard)
        offsets = None
        if any(part.zeros is not None for part in found):
            zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros.float() for part in found]
            offsets = _stacked(zeros, shard).neg_().mul_(scales)
        bits, order = self._reader.bits, weight_format.inputs
        return GroupedWeight(values, scales, weight_format.group, dtype, offsets=offsets, bits=bits, order=order)


def _write_out(numbers: QuantizedValues, groups: Tensor, into: Tensor) -> None:
    """Dequantise `numbers` into `into` [N, K], of any floating-point dtype. `groups` int64 [K]: the group of each
    input."""
    for row in range(0, len(into), _ROWS_AT_ONCE):
        rows = slice(row, row + _ROWS_AT_ONCE)
        values = numbers.values[rows].float()
        if numbers.zeros is not None:
            values -= numbers.zeros[rows].float()[:, groups]
        into[rows] = values.mul_(numbers.scales[rows][:, groups])


def _stacked(parts: list[Tensor], shard: WeightShard) -> Tensor:
    """Concatenate parts along the rows, followed by the shard's zero rows."""
    whole = torch.cat(parts)
    return F.pad(whole, (0, 0, 0, shard.padding)) if shard.padding else whole


def _inputs_of(shard: WeightShard) -> Span:
    return Span(shard.first_input, shard.first_input + shard.local_inputs)


def _arranged(numbers: QuantizedValues, weight_format: Regrouped, first_group: int) -> QuantizedValues:
    """Arrange values in pieces of equal length, padded with the value that means zero."""
    group_of = weight_format.group_of - first_group  # [pieces]
    scales = numbers.scales[:, group_of]
    zeros = None if numbers.zeros is None else numbers.zeros[:, group_of]
    if weight_format.inputs is None or weight_format.filled_up is None:
        return QuantizedValues(numbers.values, scales, zeros)
    values = numbers.values[:, weight_format.inputs]
    nowhere = weight_format.filled_up.nonzero().flatten()
    values[:, nowhere] = 0 if zeros is None else zeros[:, nowhere // weight_format.group]
    return QuantizedValues(values, scales, zeros)


class AWQReader:
    """`GroupReader` of AWQ."""

    kind = "qweight"
    bits = 4

    def __init__(self, group: int | None) -> None:
        """Set `group`, the inputs that share a scale; None: all."""
        self._group = group

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        return torch.arange(inputs) // (self._group or inputs)

    def read(self, weights: WeightSource, part: StoredPart, groups: Span) -> QuantizedValues:
        all_groups = part.all_inputs // (self._group or part.all_inputs)
        columns, within = part.rows.of_words(_IN_WORD), part.rows.within_words(_IN_WORD)
        words = part.all_rows // _IN_WORD
        kinds = (("qweight", part.all_inputs, part.inputs), ("qzeros", all_groups, groups))
        values, zeros = (
            unpack(
                take_block(weights, f"{part.name}.{kind}", (height, words), rows, columns, torch.int32).T, 4, 0, _ORDER
            )[within]  # [N, K], [N, groups]
            for kind, height, rows in kinds
        )
        scales = take_block(
            weights, f"{part.name}.scales", (all_groups, part.all_rows), groups, part.rows, torch.float32
        )
        return QuantizedValues(values, scales.T.contiguous(), zeros)


class GPTQReader:
    """`GroupReader` of GPTQ."""

    kind = "qweight"

    def __init__(self, bits: int, group: int | None, symmetric: bool, zeros_less_one: bool) -> None:
        """Set the format. `group`: inputs that share a scale; None: all. `zeros_less_one`: zero points are stored minus
        one."""
        self.bits = bits
        self._group = group
        self._symmetric = symmetric
        self._zeros_less_one = zeros_less_one

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        size = self._group or inputs
        if not weights.has(f"{name}.g_idx"):
            return torch.arange(inputs) // size
        found = torch.empty(inputs, dtype=torch.int32)
        weights.take(f"{name}.g_idx", found, shape=(inputs,))
        check_groups(f"{name}.g_idx", found, inputs // size)
        return found.long()

    def read(self, weights: WeightSource, part: StoredPart, groups: Span) -> QuantizedValues:
        in_word = 32 // self.bits
        all_groups = part.all_inputs // (self._group or part.all_inputs)
        words = take_block(
            weights, f"{part.name}.qweight", (part.all_inputs // in_word, part.all_rows),
            part.inputs.of_words(in_word), part.rows, torch.int32,
        )  # fmt: skip
        values = unpack(words.T, self.bits, 1)[:, part.inputs.within_words(in_word)]  # [N, K]
        words = take_block(
            weights, f"{part.name}.qzeros", (all_groups, part.all_rows // in_word),
            groups, part.rows.of_words(in_word), torch.int32,
        )  # fmt: skip
        if self._zeros_less_one:
            # The tools add one to each value of a word by a single addition, which may carry, so this code does as
            # well.
            words = words + sum(1 << position for position in range(0, 32, self.bits))
        zeros = unpack(words, self.bits, 1)[:, part.rows.within_words(in_word)]  # [groups, N]
        scales = take_block(
            weights, f"{part.name}.scales", (all_groups, part.all_rows), groups, part.rows, torch.float32
        )
        is_middle = self._symmetric and not zeros.any()
        return QuantizedValues(values.contiguous(), scales.T.contiguous(), None if is_middle else zeros.T.contiguous())


class IntegerReader:
    """`GroupReader` of compressed-tensors."""

    def __init__(self, bits: int, packed: bool, group: int | None, symmetric: bool) -> None:
        """Set the format. `group`: inputs that share a scale; None: all."""
        self.bits = bits
        self.kind = "weight_packed" if packed else "weight"
        self._packed = packed
        self._group = group
        self._symmetric = symmetric

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        size = self._group or inputs
        if weights.has(f"{name}.weight_g_idx"):
            found = torch.empty(inputs, dtype=torch.int64)
            weights.take(f"{name}.weight_g_idx", found, shape=(inputs,))
            if not (found == _NOT_SET).all():
                check_groups(f"{name}.weight_g_idx", found, inputs // size, size)
                return found
        return torch.arange(inputs) // size

    def read(self, weights: WeightSource, part: StoredPart, groups: Span) -> QuantizedValues:
        shape, in_word = (part.all_rows, part.all_inputs), 32 // self.bits
        if self._packed:
            words = take_block(
                weights, f"{part.name}.weight_packed", (part.all_rows, -(-part.all_inputs // in_word)),
                part.rows, part.inputs.of_words(in_word), torch.int32,
            )  # fmt: skip
            values = unpack(words, self.bits, 1)[:, part.inputs.within_words(in_word)]
        else:
            values = take_block(weights, f"{part.name}.weight", shape, part.rows, part.inputs, torch.int8)
        zeros = None if self._symmetric else self._zeros(weights, part, groups)
        return QuantizedValues(values.contiguous(), take_scales(weights, part, groups, "weight_scale"), zeros)

    def _zeros(self, weights: WeightSource, part: StoredPart, groups: Span) -> Tensor:
        name, in_word = f"{part.name}.weight_zero_point", 32 // self.bits
        all_groups = part.all_inputs // (self._group or part.all_inputs)
        if not self._packed:
            return take_block(weights, name, (part.all_rows, all_groups), part.rows, groups, torch.int8)
        shape = (-(-part.all_rows // in_word), all_groups)
        words = take_block(weights, name, shape, part.rows.of_words(in_word), groups, torch.int32)
        return unpack(words, self.bits, 0)[part.rows.within_words(in_word)]


def take_scales(weights: WeightSource, part: StoredPart, groups: Span, kind: str) -> Tensor:
    """Read scales, one per output or one for all outputs: float32 [N, groups]. `kind`: suffix after the module's
    name."""
    name = f"{part.name}.{kind}"
    shape = weights.shape_of(name)
    assert shape is not None, "preflight has checked it"
    if shape in ((), (1,)):
        one = torch.empty(1)
        weights.take(name, one, shape=(1,))
        return one.repeat(len(part.rows)).unsqueeze(1)
    if len(shape) == 1:
        scales = torch.empty(len(part.rows))
        weights.take(name, scales, shape=(part.all_rows,), start=part.rows.first)
        return scales.unsqueeze(1)
    return take_block(weights, name, (part.all_rows, shape[1]), part.rows, groups, torch.float32)
