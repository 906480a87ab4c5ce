"""Copies slices of a checkpoint's tensors into a rank's memory, checks them, and finds tensors that were not used.

Each rank has its own reader. It holds no tensors: `get_slice` gives a view of the mapped file, which is copied (and its
dtype converted) to its final place. The copy is checked while it is still in the cache: a checkpoint with a NaN or an
infinity would give nonsense for every request, so it is refused by the tensor's name.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import StartupError
from workers.weights.checkpoint import Checkpoint, Located
from workers.weights.source import check_slice, wrong_shape

# Pages of a mapped file count as memory of the rank until it is unmapped: after this many bytes it is mapped again.
REMAP_BYTES = 32 << 20
# One copy covers at most this much of a file, so that a slice of every row of a huge matrix stays bounded too.
CHUNK_BYTES = 16 << 20


class WeightReader:
    """`WeightSource` over safetensors files. Use as a context manager, or call `close`."""

    def __init__(
        self, checkpoint: Checkpoint, *, check_finite: bool = True, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """`on_read` is called after each copy, of at most `CHUNK_BYTES` of a file: a sign of progress."""
        self._checkpoint = checkpoint
        self._on_read = on_read
        self._check_finite = check_finite
        self._taken: set[str] = set()
        self._path: Path | None = None
        self._file: Any = None
        self._mapped = 0

    def __enter__(self) -> "WeightReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file. The reader can still be used, and maps it again."""
        self._file = None
        self._path = None
        self._mapped = 0

    def has(self, name: str) -> bool:
        return self._checkpoint.find(name) is not None

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        found = self._checkpoint.find(name)
        if found is None:
            raise StartupError(
                f"{self._checkpoint.directory} holds no tensor {name!r}, which the model needs.",
                "Use a complete checkpoint whose config.json names its true architecture.",
            )
        if found.entry.shape != tuple(shape):
            raise wrong_shape(name, found.path.name, found.entry.shape, shape)
        check_slice(name, into, shape, dim, start)
        self._taken.add(name)
        if into.numel() == 0:
            return
        row_bytes = (found.entry.end - found.entry.begin) // shape[0]
        rows_at_once = max(1, CHUNK_BYTES // row_bytes)
        first, count = (start, into.shape[0]) if dim == 0 else (0, shape[0])
        for offset in range(0, count, rows_at_once):
            rows = min(rows_at_once, count - offset)
            index: list[slice] = [slice(first + offset, first + offset + rows)]
            if dim > 0:
                index += [slice(None)] * (dim - 1) + [slice(start, start + into.shape[dim])]
            view = self._open(found.path, rows * row_bytes).get_slice(name)[tuple(index)]
            part = into[offset : offset + rows]
            part.copy_(view)
            if self._check_finite and (place := first_not_finite(part)) is not None:
                first_index = [bound.start or 0 for bound in index] + [0] * (part.dim() - len(index))
                raise _not_finite(name, found, part, view, place, first_index)
            del view  # it keeps its mapping alive
            self._on_read()

    def _open(self, path: Path, upcoming: int) -> Any:
        if path != self._path or self._mapped + upcoming > REMAP_BYTES:
            self.close()
            try:
                self._file = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                if "annot allocate memory" in str(error):  # for the mapping
                    raise MemoryError(f"{path}: {error}") from error
                raise StartupError(f"{path} cannot be opened: {error}.", "Download the file again.") from error
            self._path = path
        self._mapped += upcoming
        return self._file

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self.close()
        left = sorted(name for name in self._checkpoint.tensors if name not in self._taken and not ignorable(name))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise StartupError(
                f"{self._checkpoint.directory} holds tensors that its architecture has no place for: {shown}.",
                "Use a checkpoint whose config.json names its true architecture; adapters must be merged first.",
            )


def _not_finite(
    name: str, found: Located, part: Tensor, view: Tensor, place: tuple[int, ...], first_index: list[int]
) -> StartupError:
    """`part` is what was copied of `view`; `place` is relative to both, `first_index` is where they begin."""
    where = [first + index for first, index in zip(first_index, place, strict=True)]
    stored = float(view[place])
    if math.isfinite(stored):
        dtype = str(part.dtype).removeprefix("torch.")
        return StartupError(
            f"{found.path}: tensor {name!r} holds {stored:g} at {where}, which is too large for {dtype}.",
            "Use --dtype bfloat16 or --dtype float32.",
        )
    return StartupError(
        f"{found.path}: tensor {name!r} holds {'NaN' if math.isnan(stored) else stored} at {where}: every answer of "
        "this model would be meaningless.",
        "Download the file again; if it is your own, the training or conversion that wrote it went wrong.",
    )


def first_not_finite(x: Tensor) -> tuple[int, ...] | None:
    """The index of the first NaN or infinity in `x`, None when there is none.

    A NaN or an infinity anywhere makes the sum of the tensor one too, and a sum runs at the speed of memory; testing
    every element takes thirty times as long. Finite values can overflow a sum as well, so then every element is tested.
    """
    if math.isfinite(float(x.sum())):
        return None
    bad = torch.isfinite(x).logical_not_()
    place = int(bad.flatten().int().argmax())
    if not bad.flatten()[place]:
        return None  # large numbers whose sum overflowed
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(place), x.shape))
