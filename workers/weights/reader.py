"""Reader that copies slices of a checkpoint's tensors into a rank's memory, checks them, and finds unused tensors.

Each rank has its own reader. It holds no tensors: a contiguous slice in the wanted dtype is read directly into its
final memory; other slices pass through a few small buffers. Threads read later pieces while a piece is checked or
converted. A piece is checked while it is still in the cache. A checkpoint with a NaN or an infinity would give nonsense
for every request, so it is refused with the tensor's name.
"""

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.weights.source import check_slice, wrong_shape

# Disks and network file systems serve parallel reads faster than sequential reads; for the page cache it hardly
# matters.
NUM_THREADS = 4


class FileReader:
    """Reader with one open file at a time. `read` may be called for another file once all reads of the last file are
    done.

    Reading copies from the page cache faster than mapping does, which takes one page fault for every few pages. Also, a
    file that is truncated meanwhile raises an error instead of killing the process.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._path: Path | None = None
        self._fd = -1
        self._data_start = 0

    def read(self, path: Path, begin: int, into: Tensor, name: str) -> "Future[None]":
        """Fill the contiguous tensor `into` from byte `begin` of the data section of the safetensors file `path`, or of
        the whole GGUF file.

        The caller keeps `into` until the read is done. The future raises `StartupError` naming `name`, the tensor.
        """
        self._open(path)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "weights")
        return self._threads.submit(_fill, self._fd, self._data_start + begin, _memory_of(into), path, name)

    def fill(self, path: Path, begin: int, into: Tensor, name: str, on_read: Callable[[], None]) -> None:
        """Do the same in the calling thread, and call `on_read` after each piece of at most `CHUNK_BYTES`."""
        self._open(path)
        memory = _memory_of(into)
        for done in range(0, len(memory), CHUNK_BYTES):
            piece = memory[done : done + CHUNK_BYTES]
            _fill(self._fd, self._data_start + begin + done, piece, path, name)
            on_read()

    def close(self) -> None:
        """Close the file and end the threads. The reader can still be used, and opens files again."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        self._close_file()

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None

    def _open(self, path: Path) -> None:
        if path == self._path:
            return
        self._close_file()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            start = os.pread(self._fd, 8, 0)
            self._data_start = 0 if start.startswith(b"GGUF") else 8 + int.from_bytes(start, "little")
        except OSError as error:
            raise StartupError(f"{path} cannot be opened: {error.strerror}.", "Download the file again.") from error
        self._path = path


def _memory_of(into: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which must outlive them."""
    assert into.is_contiguous()
    return memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr()))


def _fill(fd: int, begin: int, memory: memoryview, path: Path, name: str) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(fd, [memory[done:]], begin + done)
        except OSError as error:
            raise StartupError(
                f"{path}: tensor {name!r} cannot be read: {error.strerror}.", "Check the disk, or copy the file again."
            ) from error
        if count == 0:
            raise StartupError(
                f"{path} ends at byte {begin + done}, in the middle of tensor {name!r}: it was cut short meanwhile.",
                "Download the file again, and start when it is complete.",
            )
        done += count


CHUNK_BYTES = 4 << 20  # bytes of a file per read
READS_AHEAD = 4  # pieces being read while another piece is checked

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


class _Piece:
    """Rows of a tensor's slice that a thread is reading."""

    def __init__(self, first_row: int, part: Tensor, stored: Callable[[], Tensor] | None, done: "Future[None]") -> None:
        self.first_row = first_row  # index in the whole tensor, of the first column if it is stored transposed
        self.part = part  # destination in the rank's memory
        # Returns the same elements as in the file, after `done`; None if `part` has them because nothing is converted.
        self.stored = stored
        self.done = done


class CheckpointReader:
    """Part of a `WeightSource` that all file formats share. Use it as a context manager, or call `close`."""

    _use_another = "Use a checkpoint whose config.json names the right architecture; adapters must be merged first."

    def __init__(
        self, checkpoint: Checkpoint, *, check_finite: bool = True, on_read: Callable[[], None] = lambda: None
    ) -> None:
        """Read `checkpoint`. `on_read` is called after each piece of at most `CHUNK_BYTES` of a file, as a sign of
        progress."""
        self._checkpoint = checkpoint
        self._on_read = on_read
        self._check_finite = check_finite
        self._taken: set[str] = set()
        self._files = FileReader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close files, end threads and free the buffers. The reader can still be used."""
        self._files.close()

    def has(self, name: str) -> bool:
        return self._checkpoint.find(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        found = self._checkpoint.find(name)
        return None if found is None else found.entry.shape

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self.close()
        left = sorted(name for name in self._checkpoint.tensors if name not in self._taken and not ignorable(name))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise StartupError(
                f"{self._file_of(left[0])} holds tensors that its architecture does not use: {shown}.",
                self._use_another,
            )

    def _file_of(self, name: str) -> Path:
        """Return the file or directory that an error about a tensor should name."""
        return self._checkpoint.directory


class WeightReader(CheckpointReader):
    """`WeightSource` over safetensors files."""

    _buffers = torch.empty((0, 0), dtype=torch.uint8)  # [READS_AHEAD + 1, bytes of the largest piece so far]

    def close(self) -> None:
        super().close()
        self._buffers = torch.empty((0, 0), dtype=torch.uint8)

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        found = self._checkpoint.find(name)
        if found is None:
            raise StartupError(
                f"{self._checkpoint.directory} holds no tensor {name!r}, which the model needs.",
                "Use a complete checkpoint whose config.json names the right architecture.",
            )
        if found.entry.shape != tuple(shape) and (found.entry.shape, tuple(shape)) != ((), (1,)):
            raise wrong_shape(name, found.path.name, found.entry.shape, shape)
        check_slice(name, into, shape, dim, start)
        self._taken.add(name)
        if into.numel() == 0:
            return
        running: deque[_Piece] = deque()
        try:
            for piece in self._pieces(name, found, into, dim, start):
                running.append(piece)
                if len(running) > READS_AHEAD:
                    self._finish(name, found, running.popleft(), dim, start)
            while running:
                self._finish(name, found, running.popleft(), dim, start)
        finally:
            wait([piece.done for piece in running])  # the reads write to memory that is ours only until this returns

    def _pieces(self, name: str, found: LocatedTensor, into: Tensor, dim: int, start: int) -> Iterator[_Piece]:
        """Begin to read the slice, and yield its pieces. At most `READS_AHEAD` + 1 of them may be unfinished."""
        shape, begin = found.stored_shape, found.entry.begin
        dtype = _DTYPES.get(found.entry.dtype)
        if dtype is None:
            raise StartupError(
                f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
                "Use the model's bfloat16, float16 or float32 checkpoint.",
            )
        # Dimension of the file's rows in the tensor; rows that are read together, and rows of the tensor among them.
        along, step, block = (1, 1, 1) if found.transposed else (0, found.step, found.block)
        is_whole_rows = dim == along or into.shape[dim] == found.entry.shape[dim]
        # A copy to another device, to another dtype, of partial rows or in another order passes through a buffer.
        is_as_stored = is_whole_rows and found.is_plain and into.dtype == dtype
        is_direct = is_as_stored and into.device.type == "cpu" and into.is_contiguous()
        group_bytes = (found.entry.end - begin) // shape[0] * step
        groups_at_once = max(1, CHUNK_BYTES // group_bytes)
        first, count = (start, into.shape[dim]) if dim == along else (0, shape[0] // step * block)
        # Groups of which at least one row is wanted: those at the ends may be read for a part of their rows.
        groups = range(first // block, -(-(first + count) // block))
        for number, group in enumerate(groups[::groups_at_once]):
            held = min(groups_at_once, groups.stop - group)
            rows = range(max(first, group * block), min(first + count, (group + held) * block))
            part = target = into.narrow(along, rows.start - first, len(rows))
            if not is_direct:
                target = self._buffer(number, held * group_bytes).view(dtype).view(held * step, *shape[1:])
            wanted = slice(rows.start - group * block, rows.stop - group * block)
            columns = None if is_whole_rows else (dim, start, into.shape[dim])
            stored = None if is_direct else partial(_elements, target, found, wanted, columns)
            done = self._files.read(found.path, begin + group * group_bytes, target, name)
            yield _Piece(rows.start, part, stored, done)

    def _buffer(self, number: int, size: int) -> Tensor:
        """Return the buffer, uint8 [size], of piece `number` of a tensor, whose first piece is the largest."""
        if self._buffers.shape[1] < size:
            self._buffers = torch.empty((READS_AHEAD + 1, -(-size // 64) * 64), dtype=torch.uint8)
        return self._buffers[number % (READS_AHEAD + 1), :size]

    def _finish(self, name: str, found: LocatedTensor, piece: _Piece, dim: int, start: int) -> None:
        """Wait for a piece, convert it if needed, and check it."""
        piece.done.result()
        stored = piece.part if piece.stored is None else piece.stored()
        if stored is not piece.part:
            piece.part.copy_(stored)
        if self._check_finite and (found_at := first_not_finite(piece.part)) is not None:
            first_index = [0] * piece.part.dim()
            first_index[dim] = start
            first_index[1 if found.transposed else 0] = piece.first_row
            where = [first + index for first, index in zip(first_index, found_at, strict=True)]
            raise not_finite(name, found, float(stored[found_at]), piece.part.dtype, f" at {where}")
        self._on_read()


def _elements(read: Tensor, found: LocatedTensor, wanted: slice, narrowed: tuple[int, int, int] | None) -> Tensor:
    """Return the tensor's elements among `read`, some rows of its file.

    `wanted`: of the tensor's rows among them, unless the file has it transposed. `narrowed`: arguments of
    `Tensor.narrow`, if only a part along the other dimension is wanted.
    """
    rows = read.T if found.transposed else read
    if found.block == 1:
        rows = rows[found.first :: found.step]
    else:
        rows = rows.unflatten(0, (-1, found.step))[:, found.first : found.first + found.block].flatten(0, 1)
    rows = rows if found.transposed else rows[wanted]
    return rows if narrowed is None else rows.narrow(*narrowed)


def not_finite(name: str, found: LocatedTensor, value: float, dtype: torch.dtype, where: str = "") -> StartupError:
    """Return the error for `value` in the file, finite if it is too large for `dtype`; `where`: index, after a
    space."""
    if math.isfinite(value):
        return StartupError(
            f"{found.path}: tensor {name!r} holds {value:g}{where}, which is too large for "
            f"{str(dtype).removeprefix('torch.')}.",
            "Use --dtype bfloat16 or --dtype float32.",
        )
    return StartupError(
        f"{found.path}: tensor {name!r} holds {'NaN' if math.isnan(value) else value}{where}: every answer of this "
        "model would be meaningless.",
        "Download the file again; if it is your own, the training or conversion that wrote it went wrong.",
    )


def first_not_finite(x: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first NaN or infinity in `x`, or None if there is none.

    A NaN or an infinity anywhere makes the sum of the tensor NaN or infinite, and a sum runs at memory speed, while
    testing every element is far slower. Finite values can overflow a sum as well, so then every element is tested.
    """
    if x.dtype == torch.float8_e4m3fn:  # has no infinity, and a NaN with each sign
        bad = x.view(torch.uint8).bitwise_and(0x7F) == 0x7F
        if not bad.any():
            return None
    elif math.isfinite(float(x.sum())):
        return None
    else:
        bad = torch.isfinite(x).logical_not_()
    index = int(bad.flatten().int().argmax())
    if not bad.flatten()[index]:
        return None  # the sum of large finite values overflowed
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(index), x.shape))
