"""The files of `/v1/files`: those that were uploaded, and those that batches have written. Each has an owner."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from oarlock.server.endpoints.batches.directory import FILE_ID, BatchDirectory
from oarlock.server.endpoints.batches.key_shares import KeyQuota
from oarlock.server.errors import HttpError
from oarlock.server.http.api_route import ListQuery
from oarlock.server.observability.logs import event, logger

MAX_FILES = 10_000
_log = logger("batch")


class Listed(Protocol):
    """An entry of a list."""

    @property
    def id(self) -> str: ...

    def wire(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The description of one file, as it is kept."""

    id: str
    owner: str | None  # the name of its API key; None: there were no keys
    bytes: int
    created_at: int
    filename: str  # the client's word for it
    purpose: str  # `batch` or `batch_output`
    expires_at: int | None = None

    def wire(self) -> dict[str, Any]:
        """The object of the API."""
        members = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {"object": "file", **members, "status": "processed", "status_details": None}


class FileStore:
    """All files of a directory. Its methods belong on the event loop, the disk is a thread's."""

    def __init__(self, directory: BatchDirectory, disk: ThreadPoolExecutor, *, is_shared: bool = False) -> None:
        """`is_shared`: by several API keys. Raises `StartupError`."""
        self.directory = directory
        self.disk = disk
        self._files: dict[str, StoredFile] = {}
        self._quota = KeyQuota(MAX_FILES, is_shared=is_shared)
        for file_id, file in directory.descriptions("files", FILE_ID, StoredFile):
            if directory.content(file_id).exists():
                self._keep(file)
                directory.count(file.owner, file.bytes)
        self.is_used: Callable[[str], bool] = lambda file_id: False  # by a batch that has not ended

    def check_room(self, owner: str | None) -> None:
        """Raises `HttpError` when a key has too many files."""
        self._drop_expired()
        if not self._quota.fits(owner, 1):
            message = (
                f"'file' would be one too many: there are {self._quota.total} files, {self._quota.held(owner)} of them "
                f"yours, and at most {MAX_FILES} are kept.{self._quota.rule} Delete those that are not needed."
            )
            raise HttpError(400, message, param="file", code="too_many_files")

    def get(self, owner: str | None, file_id: str) -> StoredFile:
        """Raises `HttpError` (404), also for a file of another key."""
        self._drop_expired()
        found = self._files.get(file_id)
        if found is None or found.owner != owner:
            message = f"There is no file '{file_id[:64]}' here (any more)."
            raise HttpError(404, message, param="file_id", code="file_not_found")
        return found

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def list(self, owner: str | None, query: ListQuery) -> dict[str, Any]:
        """A page of an owner's files."""
        self._drop_expired()
        wanted = (None, "batch", "batch_output")
        if query.purpose not in wanted:
            raise HttpError(400, "'purpose' must be batch or batch_output.", param="purpose")
        own = [file for file in self._files.values() if file.owner == owner]
        return page([file for file in own if query.purpose in (None, file.purpose)], query)

    async def delete(self, owner: str | None, file_id: str) -> dict[str, Any]:
        """Raises `HttpError` (404), or 409 while a batch reads it."""
        file = self.get(owner, file_id)
        if self.is_used(file_id):
            message = f"A batch that has not ended reads the file '{file_id}'. Cancel the batch, or wait for its end."
            raise HttpError(409, message, param="file_id", code="file_in_use")
        self._drop(file)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.disk, self.directory.remove, file.id, file.owner, file.bytes)
        return {"id": file_id, "object": "file", "deleted": True}

    async def adopt(self, source: Path, file: StoredFile) -> None:
        """Keep `source`, whose bytes were reserved before, under the id of `file`. Raises `OSError`."""
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
    """Ids made later are greater."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(5)}"


def log_failure(done: Future[None]) -> None:
    """Log the failure of work on the disk's thread that nobody waits for."""
    error = done.exception()
    if error is not None:
        _log.error(event("batch_disk_failed", cause=str(error)))


def page(items: Sequence[Listed], query: ListQuery) -> dict[str, Any]:
    """The part of the items that `query` asks for; their ids are in the order of their making. Raises `HttpError` for
    an `after` that is none of them."""
    ordered = sorted(items, key=lambda item: item.id, reverse=query.order == "desc")
    start = 0
    if query.after is not None:
        places = [place for place, item in enumerate(ordered) if item.id == query.after]
        if not places:
            message = f"'after' is '{query.after[:64]}', which is nothing of this list."
            raise HttpError(400, message, param="after")
        start = places[0] + 1
    shown = ordered[start : start + query.limit]
    return {
        "object": "list",
        "data": [item.wire() for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + len(shown) < len(ordered),
    }
