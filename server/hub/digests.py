"""Digests of files of the hub, which the cache has as the names of their contents: SHA-256, or git's hash of a blob."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from oarlock.server.hub.transfer_rate import TransferRate

Report = Callable[[str, float, str], None]  # phase, fraction, detail

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
_AT_ONCE = 4 << 20


class Digest:
    """The digest of one content, as its bytes come."""

    def __init__(self, name: str, size: int) -> None:
        """`name`: the digest that it should have. `size`: of the whole content in bytes, part of git's hash."""
        self._name = name
        self._hash = hashlib.sha256() if _SHA256.fullmatch(name) else hashlib.sha1(b"blob %d\0" % size)

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def read(self, file: BinaryIO, size: int, on_bytes: Callable[[int], None] = lambda count: None) -> Digest:
        """Take in the next `size` bytes of a file, or as many as there are."""
        while size and (data := file.read(min(size, _AT_ONCE))):
            self._hash.update(data)
            size -= len(data)
            on_bytes(len(data))
        return self

    @property
    def is_right(self) -> bool:
        return self._hash.hexdigest() == self._name


def damaged(directory: Path, report: Report) -> list[Path]:
    """The files of a snapshot whose contents are not those that their names in the cache say.

    On a file system without links the names are not kept, and nothing can be said.
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
    """Remove links with their contents, so that they are fetched again."""
    for path in files:
        path.resolve().unlink(missing_ok=True)
        path.unlink()
