"""Parts of stored matrices, and the numbers that are packed into words of 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.weights.source import WeightSource


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
        """Their place among the numbers of those words."""
        first = self.first % in_word
        return slice(first, first + len(self))


def take_block(
    weights: WeightSource, name: str, shape: Sequence[int], rows: Span, columns: Span, dtype: torch.dtype
) -> Tensor:
    """Some rows and columns of a stored matrix: [rows, columns]. Only one of them is cut by any layer."""
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
    count, middle = 32 // bits, 1 << bits - 1
    shape = [*words.shape[:dim], words.shape[dim], count, *words.shape[dim + 1 :]]
    numbers = torch.empty(shape, dtype=torch.int8)
    for index in range(count):
        place = index if order is None else order[index]
        part = (words >> index * bits & (1 << bits) - 1) - middle
        numbers.select(dim + 1, place).copy_(part)
    return numbers.flatten(dim, dim + 1)
