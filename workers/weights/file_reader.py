"""Reads byte ranges of files straight into memory, several at a time.

Reading copies from the page cache faster than mapping does, which takes one page fault for every few pages; and a file
that is cut short meanwhile is an error, not the end of the process.
"""

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from oarlock.workers.errors import StartupError

# A disk or a network file system answers several reads at once faster than one after the other; a page cache hardly.
NUM_THREADS = 4


class FileReader:
    """One open file at a time. `read` may be called for another file once all reads of the last one are done."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._path: Path | None = None
        self._fd = -1
        self._data_start = 0

    def read(self, path: Path, begin: int, into: Tensor, name: str) -> "Future[None]":
        """Fill the contiguous tensor `into` from byte `begin` of the data section of the safetensors file `path`, or of
        the whole GGUF file.

        The caller keeps `into` until the read is done. Its result raises `StartupError` naming `name`, the tensor.
        """
        assert into.is_contiguous()
        self._open(path)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, "weights")
        memory = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr()))
        return self._threads.submit(_fill, self._fd, self._data_start + begin, memory, path, name)

    def close(self) -> None:
        """Close the file and end the threads. The reader can still be used, and opens again."""
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
