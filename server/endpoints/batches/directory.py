"""The directory of `--batch-dir`: uploaded files, answers and batches, of which each state survives a kill.

A description is a JSON file that is replaced as a whole. Names on the disk are ids made here, never a client's words.
One server at a time has the directory.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from oarlock.engine.errors import StartupError
from oarlock.server.endpoints.batches.key_shares import KeyQuota

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{24}"), re.compile(r"batch_[0-9a-f]{24}")
_KindT = TypeVar("_KindT")
_SALT_BYTES = 16
_FOLDERS = ("files", "batches", "work", "uploads")


class BatchDirectory:
    """Locked once it is taken, until it is closed. Calls may come from several threads."""

    def __init__(self, path: Path, max_bytes: int, *, is_shared: bool = False) -> None:
        """`max_bytes`: of all contents. `is_shared`: by several keys. Raises `StartupError` if it cannot be used."""
        self.path = path
        self.bytes = KeyQuota(max_bytes, is_shared=is_shared)
        self._guard = threading.Lock()
        try:
            for folder in _FOLDERS:
                (path / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            cause = f"The directory of batches {path} cannot be used: {error.strerror}."
            raise StartupError(cause, "Give --batch-dir a directory that this user may write to.") from None

    def take(self) -> bool:
        """Lock it. False: another server has it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for left in (self.path / "uploads").iterdir():  # of uploads that a kill has ended
            left.unlink()
        return True

    def salt(self) -> bytes:
        """Random bytes that belong to this directory; made when they are first asked for. Raises `StartupError`."""
        path = self.path / "salt"
        try:
            if not path.exists():
                temporary = self.new_upload()
                temporary.touch(mode=0o600)
                temporary.write_bytes(secrets.token_bytes(_SALT_BYTES))
                temporary.replace(path)
                _sync(self.path)
            return path.read_bytes()
        except OSError as error:
            cause = f"{path} cannot be used: {error.strerror}."
            raise StartupError(cause, "Give --batch-dir a directory that this user may write to.") from None

    def close(self) -> None:
        """Another server may have it. A second call changes nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def count(self, owner: str | None, num_bytes: int) -> None:
        """Count what is there already, or (below 0) is no more."""
        with self._guard:
            self.bytes.add(owner, num_bytes)

    def reserve(self, owner: str | None, num_bytes: int) -> None:
        """Count so many bytes more of a key (or fewer, below 0). Raises `OSError` (EDQUOT) beyond the limit."""
        with self._guard:
            if num_bytes > 0 and not self.bytes.fits(owner, num_bytes):
                cause = f"no more fits into --batch-dir-size of {self.bytes.limit} bytes.{self.bytes.rule}"
                raise OSError(errno.EDQUOT, cause.rstrip("."))
            self.bytes.add(owner, num_bytes)

    def content(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self.path / "files" / file_id

    def work(self, batch_id: str, kind: str) -> Path:
        """Where answers of a batch are collected. `kind`: `output` or `errors`."""
        return self.path / "work" / f"{batch_id}.{kind}"

    def new_upload(self) -> Path:
        """A file for what is not complete yet."""
        return self.path / "uploads" / secrets.token_hex(12)

    def save(self, folder: str, name: str, value: dict[str, Any]) -> None:
        """Replace a description; it is on the disk when this returns. Raises `OSError`."""
        path = self.path / folder / f"{name}.json"
        written = json.dumps(value).encode()
        temporary = self.path / "uploads" / f"{name}.json"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)

    def adopt(self, source: Path, file_id: str, description: dict[str, Any]) -> None:
        """Make `source` the content of a file. Raises `OSError`; a kill in between leaves `source` as it was."""
        self.save("files", file_id, description)
        source.replace(self.content(file_id))
        _sync(self.content(file_id).parent)

    def remove(self, file_id: str, owner: str | None, num_bytes: int) -> None:
        """Delete a file and its description."""
        self.content(file_id).unlink(missing_ok=True)
        (self.path / "files" / f"{file_id}.json").unlink(missing_ok=True)
        self.count(owner, -num_bytes)

    def forget(self, batch_id: str) -> None:
        """Delete a batch's description."""
        (self.path / "batches" / f"{batch_id}.json").unlink(missing_ok=True)

    def descriptions(
        self, folder: str, pattern: re.Pattern[str], kind: Callable[..., _KindT]
    ) -> Iterator[tuple[str, _KindT]]:
        """Every id and description of a folder. Raises `StartupError` for one that cannot be read."""
        for path in sorted((self.path / folder).glob("*.json")):
            if not pattern.fullmatch(path.stem):
                continue
            try:
                yield path.stem, kind(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                cause = f"{path} cannot be read: {error}."
                raise StartupError(cause, "Remove it, or give --batch-dir another directory.") from None


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
