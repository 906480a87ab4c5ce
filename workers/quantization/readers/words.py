"""Parts of stored matrices, and the numbers that are packed into words of 32 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.weights.source import WeightSource


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
