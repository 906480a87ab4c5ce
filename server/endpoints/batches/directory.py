"""The directory of `--batch-dir`, and the files of `/v1/files` in it. Each state of a file survives a kill.

Files are uploaded, or written by batches; each has an owner. The description of a file or a batch is a JSON file that
is replaced as a whole. Names on the disk are ids made here, never text from a client. Only one server at a
time holds the directory.
"""

import asyncio
import errno
import fcntl
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from oarlock.base.errors import StartupError
from oarlock.server.endpoints.batches.key_shares import KeyQuota
from oarlock.server.errors import HttpError
from oarlock.server.http.api_route import ListQuery
from oarlock.server.observability.logs import event, logger

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{24}"), re.compile(r"batch_[0-9a-f]{24}")
_KindT = TypeVar("_KindT")
_SALT_BYTES = 16
_FOLDERS = ("files", "batches", "work", "uploads")
MAX_FILES = 10_000
_log = logger("batch")


class BatchDirectory:
    """The directory, locked from `take` to `close`. Its methods may be called from several threads."""

    def __init__(self, path: Path, max_bytes: int, *, is_shared: bool = False) -> None:
        """Create missing folders. Raises `StartupError` if the directory cannot be used.

        `max_bytes`: limit of all contents. `is_shared`: several API keys share it.
        """
        self.path = path
        self.bytes = KeyQuota(max_bytes, is_shared=is_shared)
        self._guard = threading.Lock()
        try:
            for folder in _FOLDERS:
                (path / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            cause = f"The batch directory {path} cannot be used: {error.strerror}."
            raise StartupError(cause, "Give --batch-dir a directory that this user can write to.") from None

    def take(self) -> bool:
        """Lock the directory. Return False if another server holds it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for left in (self.path / "uploads").iterdir():  # left by uploads that a kill interrupted
            left.unlink()
        return True

    def salt(self) -> bytes:
        """Return this directory's random salt, which is made at the first call. Raises `StartupError`."""
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
            raise StartupError(cause, "Give --batch-dir a directory that this user can write to.") from None

    def close(self) -> None:
        """Release the directory for other servers. A second call changes nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def count(self, owner: str | None, num_bytes: int) -> None:
        """Count bytes that already exist, or (below 0) that were removed."""
        with self._guard:
            self.bytes.add(owner, num_bytes)

    def reserve(self, owner: str | None, num_bytes: int) -> None:
        """Count `num_bytes` more for a key (or fewer, if below 0). Raises `OSError` (EDQUOT) beyond the limit."""
        with self._guard:
            if num_bytes > 0 and not self.bytes.fits(owner, num_bytes):
                cause = f"--batch-dir-size of {self.bytes.limit} bytes is used up.{self.bytes.rule}"
                raise OSError(errno.EDQUOT, cause.rstrip("."))
            self.bytes.add(owner, num_bytes)

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.path / "files" / file_id

    def work(self, batch_id: str, kind: str) -> Path:
        """Return the path at which a batch's responses are collected. `kind`: `output` or `errors`."""
        return self.path / "work" / f"{batch_id}.{kind}"

    def new_upload(self) -> Path:
        """Return a new path for content that is not complete yet."""
        return self.path / "uploads" / secrets.token_hex(12)

    def save(self, folder: str, name: str, value: dict[str, Any]) -> None:
        """Replace a description. It is on the disk when this returns. Raises `OSError`."""
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
        """Make `source` the content of a file. Raises `OSError`. A kill in between leaves `source` as it was."""
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
        """Yield every id and description of a folder. Raises `StartupError` for a description that cannot be read."""
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


class ListEntry(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...

    def wire(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The description of one file, as it is kept on the disk."""

    id: str
    owner: str | None  # name of the API key on the disk; None: there were no keys
    bytes: int
    created_at: int
    filename: str  # the name that the client gave
    purpose: str  # `batch` or `batch_output`
    expires_at: int | None = None

    def wire(self) -> dict[str, Any]:
        """Return the API's object."""
        members = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {"object": "file", **members, "status": "processed", "status_details": None}


class FileStore:
    """All files of a directory. Call its methods on the event loop; a thread of `disk` does the I/O."""

    def __init__(self, directory: BatchDirectory, disk: ThreadPoolExecutor, *, is_shared: bool = False) -> None:
        """Read the descriptions of all files. `is_shared`: several API keys share the store. Raises `StartupError`."""
        self.directory = directory
        self.disk = disk
        self._files: dict[str, StoredFile] = {}
        self._quota = KeyQuota(MAX_FILES, is_shared=is_shared)
        for file_id, file in directory.descriptions("files", FILE_ID, StoredFile):
            if directory.content(file_id).exists():
                self._keep(file)
                directory.count(file.owner, file.bytes)
        self.is_used: Callable[[str], bool] = lambda file_id: False  # True if a batch that has not ended uses the file

    def check_room(self, owner: str | None) -> None:
        """Raise `HttpError` if a key has too many files."""
        self._drop_expired()
        if not self._quota.fits(owner, 1):
            message = (
                f"'file' exceeds the limit of {MAX_FILES} files: {self._quota.total} are stored, "
                f"{self._quota.held(owner)} of them yours.{self._quota.rule} Delete files that you do not "
                "need."
            )
            raise HttpError(400, message, param="file", code="too_many_files")

    def get(self, owner: str | None, file_id: str) -> StoredFile:
        """Return a file's description. Raises `HttpError` (404), also for a file of another key."""
        self._drop_expired()
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            message = f"The file '{file_id[:64]}' does not exist, or was deleted."
            raise HttpError(404, message, param="file_id", code="file_not_found")
        return found

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def list(self, owner: str | None, query: ListQuery) -> dict[str, Any]:
        """Return a page of an owner's files."""
        self._drop_expired()
        wanted = (None, "batch", "batch_output")
        if query.purpose not in wanted:
            raise HttpError(400, "'purpose' must be batch or batch_output.", param="purpose")
        own = [file for file in self._files.values() if file.owner == owner]
        return page([file for file in own if query.purpose in (None, file.purpose)], query)

    async def delete(self, owner: str | None, file_id: str) -> dict[str, Any]:
        """Delete a file. Raises `HttpError`: 404 if there is no such file, 409 while a batch reads it."""
        file = self.get(owner, file_id)
        if self.is_used(file_id):
            message = (
                f"The file '{file_id}' is the input of a batch that has not ended. Cancel the batch, "
                "or wait until it ends."
            )
            raise HttpError(409, message, param="file_id", code="file_in_use")
        self._drop(file)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.disk, self.directory.remove, file.id, file.owner, file.bytes)
        return {"id": file_id, "object": "file", "deleted": True}

    async def adopt(self, source: Path, file: StoredFile) -> None:
        """Keep `source`, whose bytes are reserved already, under the id of `file`. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.disk, self.directory.adopt, source, file.id, asdict(file))
        self._keep(file)

    def _keep(self, file: StoredFile) -> None:
        self._files[file.id] = file
        self._quota.add(file.owner, 1)

    def _drop(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._quota.add(file.owner, -1)

    def _drop_expired(self) -> None:
        now = time.time()
        for file in [file for file in self._files.values() if (file.expires_at or now + 1) <= now]:
            if not self.is_used(file.id):
                self._drop(file)
                removed = self.disk.submit(self.directory.remove, file.id, file.owner, file.bytes)
                removed.add_done_callback(log_failure)


def new_id(prefix: str) -> str:
    """Return a new id, which is greater than all earlier ids."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(5)}"


def log_failure(done: Future[None]) -> None:
    """Log the failure of work on the disk's thread that no caller waits for."""
    error = done.exception()
    if error is not None:
        _log.error(event("batch_disk_failed", cause=str(error)))


def page(items: Sequence[ListEntry], query: ListQuery) -> dict[str, Any]:
    """Return the part of `items` that `query` asks for. Ids sort by their time of creation.

    Raises `HttpError` if `after` is not an id of these items.
    """
    ordered = sorted(items, key=lambda item: item.id, reverse=query.order == "desc")
    start = 0
    if query.after is not None:
        matches = [index for index, item in enumerate(ordered) if item.id == query.after]
        if not matches:
            message = f"'after' is '{query.after[:64]}', which is not in this list."
            raise HttpError(400, message, param="after")
        start = matches[0] + 1
    shown = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": [item.wire() for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(ordered),
    }
