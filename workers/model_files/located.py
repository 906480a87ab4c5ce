"""Location of a tensor (its description, bytes and file), and parts of it that are read as tensors. Torch-free."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file describes it."""

    dtype: str  # the format's name: BF16, F16, F32, ...
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header; in a GGUF file from the start of the file
    end: int


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor and the file that contains it."""

    path: Path
    entry: TensorEntry
    # The bytes from `begin` to `end` may be a larger matrix: of each group of `step` rows of it, or of its transpose,
    # the tensor has `block` rows, from row `first` of the group on.
    step: int = 1
    first: int = 0
    block: int = 1
    transposed: bool = False

    @property
    def is_plain(self) -> bool:
        """True if the bytes are exactly the tensor's, in its order."""
        return self.step == 1 and not self.transposed

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the bytes from `begin` to `end`."""
        rows, *rest = self.entry.shape or (1,)  # a scalar is a row of one
        shape = (rows // self.block * self.step, *rest)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def shaped(self, *shape: int) -> "LocatedTensor":
        """Return a tensor of the same bytes with another shape."""
        return replace(self, entry=replace(self.entry, shape=shape))

    def transpose(self) -> "LocatedTensor":
        """Return the transposed matrix, or each matrix of a stack transposed; then `part` gives a matrix of the
        stack."""
        assert self.is_plain
        *stack, rows, columns = self.entry.shape
        return replace(self.shaped(*stack, columns, rows), transposed=True)

    def every(self, step: int, first: int, block: int = 1) -> "LocatedTensor":
        """Return `block` rows, from row `first` on, of each group of `step` rows of the tensor."""
        rows, *rest = self.entry.shape
        assert self.step == 1 and rows % step == 0 and first + block <= step
        return replace(self.shaped(rows // step * block, *rest), step=step, first=first, block=block)

    def part(self, number: int) -> "LocatedTensor":
        """Return the tensor at index `number` of the first dimension, without that dimension."""
        entry = self.entry
        size = (entry.end - entry.begin) // entry.shape[0]
        begin = entry.begin + number * size
        return replace(self, entry=replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size))
