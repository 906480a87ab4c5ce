"""The numbers of a GPTQ weight: `qweight` [K / n, N], `qzeros` [groups, N / n], `scales` [groups, N], n in a word."""

import torch
from torch import Tensor

from oarlock.workers.quantization.readers.grouped_method import Numbers, StoredPart
from oarlock.workers.quantization.readers.regroup import check_groups
from oarlock.workers.quantization.readers.words import Span, take_block, unpack
from oarlock.workers.weights.source import WeightSource


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
