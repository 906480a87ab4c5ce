"""Readers of whole numbers with scales as AWQ, GPTQ and compressed-tensors store them, n numbers in a word of 32 bits.

AWQ                 `qweight` [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N]
GPTQ                `qweight` [K / n, N], `qzeros` [groups, N / n], `scales` [groups, N]
compressed-tensors  `weight_packed` [N, K / n] or `weight` int8 [N, K]; `weight_scale` has one number, [N, 1] or
                    [N, groups]; `weight_zero_point` the same shape, packed along the outputs where the weight is
"""

import torch
from torch import Tensor

from oarlock.workers.quantization.readers.grouped_method import (
    Numbers,
    Span,
    StoredPart,
    check_groups,
    take_block,
    unpack,
)
from oarlock.workers.weights.source import WeightSource

_IN_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each number of a word


class AWQReader:
    """`GroupReader` of AWQ."""

    kind = "qweight"
    bits = 4

    def __init__(self, group: int | None) -> None:
        """`group`: inputs that share a scale, None for all."""
        self._group = group

    def groups(self, weights: WeightSource, name: str, inputs: int) -> Tensor:
        return torch.arange(inputs) // (self._group or inputs)

    def numbers(self, weights: WeightSource, part: StoredPart, groups: Span) -> Numbers:
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
        return Numbers(values, scales.T.contiguous(), zeros)


class GPTQReader:
    """`GroupReader` of GPTQ."""

    kind = "qweight"

    def __init__(self, bits: int, group: int | None, symmetric: bool, zeros_less_one: bool) -> None:
        """`group`: inputs that share a scale, None for all. `zeros_less_one`: that is how they are stored."""
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

    def numbers(self, weights: WeightSource, part: StoredPart, groups: Span) -> Numbers:
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
            # The tools add one to each number of a word by a single addition, which may carry: so does this.
            words = words + sum(1 << place for place in range(0, 32, self.bits))
        zeros = unpack(words, self.bits, 1)[:, part.rows.within_words(in_word)]  # [groups, N]
        scales = take_block(
            weights, f"{part.name}.scales", (all_groups, part.all_rows), groups, part.rows, torch.float32
        )
        is_middle = self._symmetric and not zeros.any()
        return Numbers(values.contiguous(), scales.T.contiguous(), None if is_middle else zeros.T.contiguous())


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
