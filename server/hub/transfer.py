"""Transfer of files from the hub: progress, speed, remaining time, and digests of received files.

The cache names files by the digests of their contents: SHA-256, or git's hash of a blob.
"""

import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from oarlock.server.config.options import format_size

_WINDOW_S = 10.0  # time over which the speed is measured


class TransferRate:
    """Progress of a transfer of `total` bytes, counted by several threads."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._lock = threading.Lock()
        self._here = 0
        self._received = 0  # bytes since the start, without bytes that were already here
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, count: int, *, is_new: bool = True) -> None:
        with self._lock:
            self._here += count
            self._received += count if is_new else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self._here / self._total) if self._total else 1.0

    def describe(self) -> str:
        """Return the progress as text: `1.2 GiB of 4.9 GiB, 35.1 MiB/s, 1 min 48 s left`, with the latest speed."""
        now, received = self._clock(), self._received
        while len(self._samples) > 1 and now - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        self._samples.append((now, received))
        words = f"{format_size(self._here)} of {format_size(self._total)}"
        if now <= since or self._here >= self._total:
            return words
        speed = (received - before) / (now - since)
        words += f", {format_size(int(speed))}/s"
        return f"{words}, {in_words((self._total - self._here) / speed)} left" if speed > 0 else words


def in_words(seconds: float) -> str:
    """Return a duration as text: `45 s`, `1 min 48 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


Report = Callable[[str, float, str], None]  # phase, fraction, detail

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 4 << 20


class Digest:
    """The digest of one file, updated as its bytes arrive."""

    def __init__(self, name: str, size: int) -> None:
        """`name`: the expected digest. `size`: of the whole file in bytes, part of git's hash."""
        self._name = name
        self._hash = (
            hashlib.sha256() if _SHA256.fullmatch(name) else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        )

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def read(self, file: BinaryIO, size: int, on_bytes: Callable[[int], None] = lambda count: None) -> "Digest":
        """Add the next `size` bytes of a file, or all that are left."""
        while size and (data := file.read(min(size, _CHUNK_BYTES))):
            self._hash.update(data)
            size -= len(data)
            on_bytes(len(data))
        return self

    @property
    def is_right(self) -> bool:
        return self._hash.hexdigest() == self._name


def damaged(directory: Path, report: Report) -> list[Path]:
    """Return the files of a snapshot whose digests differ from their names in the cache.

    On a file system without links these names are lost, so nothing can be checked.
    """
    named = [(path, path.resolve()) for path in sorted(directory.rglob("*")) if path.is_symlink() and path.exists()]
    checked = [(path, blob) for path, blob in named if _SHA256.fullmatch(blob.name) or _GIT.fullmatch(blob.name)]
    rate = TransferRate(sum(blob.stat().st_size for _, blob in checked))
    found = []
    for path, blob in checked:
        size = blob.stat().st_size
        with blob.open("rb") as file:

            def count(more: int) -> None:
                rate.add(more)
                report("checking digests", rate.fraction, rate.describe())

            if not Digest(blob.name, size).read(file, size, count).is_right:
                found.append(path)
    return found


def remove(files: Sequence[Path]) -> None:
    """Remove links together with their contents, so that they are fetched again."""
    for path in files:
        path.resolve().unlink(missing_ok=True)
        path.unlink()
