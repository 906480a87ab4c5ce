"""The numbers of an AWQ weight: `qweight` [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N]."""

import torch
from torch import Tensor

from oarlock.workers.quantization.readers.grouped_method import Numbers, StoredPart
from oarlock.workers.quantization.readers.words import Span, take_block, unpack
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
