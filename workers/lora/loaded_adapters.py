"""Adapters of one rank: read into host memory in the background, and copied into slots.

Implements `RankAdapters` (`workers/adapters.py`).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from oarlock.base.errors import StartupError
from oarlock.base.watched_reads import OnRead, StalledReadError, WatchedRead
from oarlock.workers.adapters import STALLED, AdapterError
from oarlock.workers.lora.adapter_file import Adapter, version_of
from oarlock.workers.lora.adapter_reads import AdapterReads
from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter
from oarlock.workers.lora.rank_adapter import read_adapter

_log = logging.getLogger("oarlock.runner")


class LoadedAdapters:
    """`RankAdapters` of one rank."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self._reads = AdapterReads(self._read)
        self._prepared: dict[str, WatchedRead[HostAdapter]] = {}  # digest -> the read of its copy in host memory
        self._reported: set[str] = set()

    @property
    def prepared(self) -> list[str]:
        """Digests of all adapters that were prepared, also before their reading has ended."""
        return list(self._prepared)

    def prepare(self, digest: str, directory: str) -> None:
        """Begin to read the adapter in `directory`, as `RankAdapters` describes."""
        if digest not in self._prepared:
            self._prepared[digest] = self._reads.begin(digest, directory)
        self._reported.discard(digest)

    def put(self, digest: str, slot: int) -> None:
        """Copy a prepared adapter to `slot`, after its preparation has ended. Raises `AdapterError`."""
        if digest not in self._prepared:
            raise AdapterError(f"adapter {digest} was never prepared")
        try:
            adapter = self._prepared[digest].wait(self._reads.update)
        except Exception as error:
            raise AdapterError(f"adapter {digest} was not loaded: {_reason(error)}") from error
        for other, held in list(self.slots.digests.items()):
            if held == digest and other != slot:
                self.slots.clear(other)
        self.slots.put(adapter, slot)

    def drop(self, digest: str) -> None:
        """Forget an adapter, as `RankAdapters` describes."""
        found = self._prepared.pop(digest, None)
        self._reported.discard(digest)
        if found is not None:
            self._reads.leave(found)
        for slot, held in list(self.slots.digests.items()):
            if held == digest:
                self.slots.clear(slot)

    def ready(self) -> Mapping[str, str | None]:
        """Return the preparations that have ended since the last call, as `RankAdapters` describes."""
        self._reads.update()
        ended: dict[str, str | None] = {}
        for digest, one in list(self._prepared.items()):
            if digest in self._reported or not (one.result.done() or one.is_stalled):
                continue
            self._reported.add(digest)
            error = one.result.exception() if one.result.done() else StalledReadError(one.path)
            ended[digest] = None if error is None else _reason(error)
            if error is not None:
                del self._prepared[digest]
                self._reads.leave(one)
        return ended

    def close(self) -> None:
        """Let the threads that read end soon."""
        self._reads.close()

    def _read(self, digest: str, directory: Path, on_read: OnRead) -> HostAdapter:
        """Read an adapter. Raises `StartupError`, also if the files have another digest or change meanwhile."""
        version = version_of(directory)
        adapter = Adapter.open(directory, self.slots.model.spec, on_read=on_read)
        host = read_adapter(adapter, self.slots, on_read) if adapter.digest == digest else None
        if host is None or version_of(directory) != version:
            raise StartupError(f"the files in {directory} have changed.", "Load the adapter again.")
        device = self.slots.model.placement.device
        if device.type != "cuda":
            return host
        torch.cuda.set_device(device)  # of this thread, which would otherwise use memory of device 0
        return host.pinned()


def _reason(error: BaseException) -> str:
    """Return the reason of a failure in one line, or `STALLED`. Unexpected errors are logged with their trace."""
    if isinstance(error, StalledReadError):
        return STALLED
    if not isinstance(error, StartupError | OSError):
        _log.error("event=adapter_failed", exc_info=error)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
