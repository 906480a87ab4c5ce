"""The whole numbers of compressed-tensors: `weight_packed` [N, K / n] with n in a word, or `weight` int8 [N, K].

`weight_scale` has one number, [N, 1] or [N, groups]; `weight_zero_point` the same shape, packed along the outputs where
the weight is packed.
"""

import torch
from torch import Tensor

from oarlock.workers.quantization.readers.grouped_method import Numbers, StoredPart
from oarlock.workers.quantization.readers.regroup import check_groups
from oarlock.workers.quantization.readers.words import Span, take_block, unpack
from oarlock.workers.weights.source import WeightSource

_NOT_SET = -1  # of every input, where a tool has made room for groups and not ordered any


class IntegerReader:
    """`GroupReader` of compressed-tensors."""

    def __init__(self, bits: int, packed: bool, group: int | None, symmetric: bool) -> None:
        """`group`: inputs that share a scale, None for all."""
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

    def numbers(self, weights: WeightSource, part: StoredPart, groups: Span) -> Numbers:
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
        return Numbers(values.contiguous(), take_scales(weights, part, groups, "weight_scale"), zeros)

    def _zeros(self, weights: WeightSource, part: StoredPart, groups: Span) -> Tensor:
        name, in_word = f"{part.name}.weight_zero_point", 32 // self.bits
        all_groups = part.all_inputs // (self._group or part.all_inputs)
        if not self._packed:
            return take_block(weights, name, (part.all_rows, all_groups), part.rows, groups, torch.int8)
        shape = (-(-part.all_rows // in_word), all_groups)
        words = take_block(weights, name, shape, part.rows.of_words(in_word), groups, torch.int32)
        return unpack(words, self.bits, 0)[part.rows.within_words(in_word)]


def take_scales(weights: WeightSource, part: StoredPart, groups: Span, kind: str) -> Tensor:
    """Reads scales, of each output or one for all: float32 [N, groups]. `kind`: what follows the module's name."""
    name = f"{part.name}.{kind}"
    shape = weights.shape_of(name)
    assert shape is not None, "preflight has found it"
    if shape in ((), (1,)):
        one = torch.empty(1)
        weights.take(name, one, shape=(1,))
        return one.repeat(len(part.rows)).unsqueeze(1)
    if len(shape) == 1:
        scales = torch.empty(len(part.rows))
        weights.take(name, scales, shape=(part.all_rows,), start=part.rows.first)
        return scales.unsqueeze(1)
    return take_block(weights, name, (part.all_rows, shape[1]), part.rows, groups, torch.float32)
