"""Where a tensor is: its description, its bytes and its file; and parts of it that are read as tensors. Torch-free."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file describes it."""

    dtype: str  # the format's name: BF16, F16, F32, ...
    shape: tuple[int, ...]
    begin: int  # bytes, counted from the end of the header; in a GGUF file from its beginning
    end: int


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor and the file it is in."""

    path: Path
    entry: TensorEntry

    def shaped(self, *shape: int) -> "Located":
        """A tensor of the same bytes in other lengths."""
        return replace(self, entry=replace(self.entry, shape=shape))

    def part(self, number: int) -> "Located":
        """One of the tensors along the first dimension, without that dimension."""
        entry = self.entry
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + number * size
        return replace(self, entry=replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size))
