"""Reads slices of a GGUF model's tensors into a rank's memory: as numbers, or as whole numbers in groups.

Like `WeightReader` it reads ahead in pieces of a few mebibytes, and refuses a tensor that holds a NaN or an infinity.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import Located
from oarlock.workers.weights.file_reader import FileReader
from oarlock.workers.weights.gguf.block_types import FLOATS, SERVED
from oarlock.workers.weights.gguf.blocks import Groups, unpacked
from oarlock.workers.weights.gguf.checkpoint import GGUFCheckpoint, type_not_served
from oarlock.workers.weights.gguf.names import Layout
from oarlock.workers.weights.reader import first_not_finite, not_finite
from oarlock.workers.weights.source import check_slice, wrong_shape

CHUNK_BYTES = 4 << 20  # of a file, in one read
_READS_AHEAD = 3
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFReader:
    """`WeightSource` over GGUF files. Use as a context manager, or call `close`."""

    def __init__(
        self, checkpoint: GGUFCheckpoint, *, check_finite: bool = True, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """`on_read` is called after each piece of at most `CHUNK_BYTES` of a file: a sign of progress."""
        self._checkpoint = checkpoint
        self._on_read = on_read
        self._check_finite = check_finite
        self._taken: set[str] = set()
        self._files = FileReader()

    def __enter__(self) -> "GGUFReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files and end threads. The reader can still be used."""
        self._files.close()

    def has(self, name: str) -> bool:
        return self._checkpoint.find(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        found = self._checkpoint.find(name)
        return None if found is None else found.entry.shape

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource`. Blocks are dequantised in float32 and rounded to `into`'s type."""
        found = self._found(name, shape)
        check_slice(name, into, shape, dim, start)
        rows = (start, into.shape[0]) if dim == 0 else (0, shape[0])
        columns = slice(start, start + into.shape[1]) if dim == 1 else slice(None)
        kind, added = found.entry.dtype, self._checkpoint.layout(name).added
        for first, raw in self._rows(name, found, *rows):
            stored = raw.view(_DTYPES[kind]) if kind in FLOATS else unpacked(kind, raw).dequantised()
            if len(shape) == 1:
                stored = stored.view(-1)
            elif dim == 1:
                stored = stored[:, columns]
            part = into[first : first + len(stored)]
            part.copy_(stored.float() - added if added else stored)
            if self._check_finite and (place := first_not_finite(part)) is not None:
                raise not_finite(name, found, stored[place].item(), part.dtype)
            self._on_read()

    def take_groups(
        self, name: str, into: Groups, *, shape: Sequence[int], first_row: int = 0, first_input: int = 0
    ) -> None:
        """Fill `into` with rows and inputs of a tensor [N, K] of blocks, from `first_row` and `first_input` on.

        The group of `into` divides that of the tensor's type, and `first_input`.
        """
        found = self._found(name, shape)
        inputs = into.values.shape[1]
        columns = slice(first_input, first_input + inputs)
        groups = slice(first_input // into.group, first_input // into.group + into.scales.shape[1])
        for first, raw in self._rows(name, found, first_row, len(into.values)):
            whole, part = unpacked(found.entry.dtype, raw), into.rows(first, len(raw))
            assert whole.group % into.group == 0 and first_input % into.group == 0, f"{name}: groups are cut"
            part.values.copy_(whole.values[:, columns])
            for kept, stored in ((part.scales, whole.scales), (part.offsets, whole.offsets)):
                if kept is not None and stored is not None:
                    kept.copy_(stored.repeat_interleave(whole.group // into.group, 1)[:, groups])
                    if self._check_finite and (place := first_not_finite(kept)) is not None:
                        raise not_finite(name, found, kept[place].item(), torch.float32)
            self._on_read()

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self.close()
        left = sorted(name for name in self._checkpoint.tensors if name not in self._taken and not ignorable(name))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise StartupError(
                f"{self._checkpoint.tensors[left[0]].path} holds tensors that its architecture has no place for: "
                f"{shown}.",
                "Use a file that llama.cpp's converter wrote; adapters must be merged first.",
            )

    def _find(self, name: str) -> Located:
        found = self._checkpoint.find(name)
        if found is None:
            raise StartupError(
                f"the GGUF model described in {self._checkpoint.directory} holds no tensor {name!r}, which it needs.",
                "Use a file that holds the whole model.",
            )
        return found

    def _found(self, name: str, shape: Sequence[int]) -> Located:
        found = self._find(name)
        if found.entry.shape != tuple(shape):
            raise wrong_shape(name, found.path.name, found.entry.shape, shape)
        if found.entry.dtype not in SERVED:
            raise type_not_served(name, found)
        self._taken.add(name)
        return found

    def _rows(self, name: str, found: Located, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Stored rows `first` to `first + count` in Hugging Face's order, piece by piece: (row of the slice, uint8 [n,
        bytes of a row]). A vector is one row for each of its numbers.
        """
        entry, order = found.entry, self._checkpoint.layout(name)
        row_bytes = (entry.end - entry.begin) // entry.shape[0]
        at_once = max(1, CHUNK_BYTES // row_bytes)
        if order.interleaved_heads:  # whole heads, whose rows change places
            at_once = max(order.head_dim, at_once // order.head_dim * order.head_dim)
            assert first % order.head_dim == 0 and count % order.head_dim == 0, f"{name}: a slice cuts a head"
        running: deque[tuple[int, Tensor, Future[None]]] = deque()
        try:
            for offset in range(0, count, at_once):
                rows = min(at_once, count - offset)
                raw = torch.empty((rows, row_bytes), dtype=torch.uint8)
                begin = entry.begin + (first + offset) * row_bytes
                running.append((offset, raw, self._files.read(found.path, begin, raw, name)))
                if len(running) > _READS_AHEAD:
                    yield _finished(*running.popleft(), first, order)
            while running:
                yield _finished(*running.popleft(), first, order)
        finally:
            wait([done for _, _, done in running])  # they write to memory that is ours only until this returns


def _finished(offset: int, raw: Tensor, done: "Future[None]", first: int, order: Layout) -> tuple[int, Tensor]:
    done.result()
    heads = min(len(raw), max(0, order.interleaved_heads * order.head_dim - first - offset))
    if heads:
        pairs = raw[:heads].view(-1, order.head_dim // 2, 2, raw.shape[1])
        raw[:heads] = pairs.transpose(1, 2).reshape(heads, -1)
    return offset, raw
