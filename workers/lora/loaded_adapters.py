"""Adapters of one rank: read into host memory in the background, and copied into slots.

Implements `RankAdapters` (`workers/adapters.py`). One thread reads, one adapter after the other, so that loading takes
at most one core from the steps that run meanwhile.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from oarlock.base.errors import StartupError
from oarlock.workers.adapters import AdapterError
from oarlock.workers.lora.adapter_file import Adapter, version_of
from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter
from oarlock.workers.lora.rank_adapter import read_adapter

_log = logging.getLogger("oarlock.runner")


class LoadedAdapters:
    """`RankAdapters` of one rank."""

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        # Torch would start further threads for large tensors, on the cores of the steps.
        self._reader = ThreadPoolExecutor(1, "adapters", torch.set_num_threads, (1,))
        self._prepared: dict[str, Future[HostAdapter]] = {}  # digest -> its copy in host memory
        self._reported: set[str] = set()

    @property
    def prepared(self) -> list[str]:
        """Digests of all adapters that were prepared, also before their reading has ended."""
        return list(self._prepared)

    def prepare(self, digest: str, directory: str) -> None:
        """Begin to read the adapter in `directory`, as `RankAdapters` describes."""
        if digest not in self._prepared:
            self._prepared[digest] = self._reader.submit(self._read, digest, Path(directory))
        self._reported.discard(digest)

    def put(self, digest: str, slot: int) -> None:
        """Copy a prepared adapter to `slot`, after its preparation has ended. Raises `AdapterError`."""
        if digest not in self._prepared:
            raise AdapterError(f"adapter {digest} was never prepared")
        try:
            adapter = self._prepared[digest].result()
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
            found.cancel()
        for slot, held in list(self.slots.digests.items()):
            if held == digest:
                self.slots.clear(slot)

    def ready(self) -> Mapping[str, str | None]:
        """Return the preparations that have ended since the last call: digest -> reason of the failure, or None."""
        ended: dict[str, str | None] = {}
        for digest, one in list(self._prepared.items()):
            if digest in self._reported or not one.done():
                continue
            self._reported.add(digest)
            error = one.exception()
            ended[digest] = None if error is None else _reason(error)
            if error is not None:
                del self._prepared[digest]
        return ended

    def close(self) -> None:
        """Let the thread that reads end after the adapter that it reads now."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, digest: str, directory: Path) -> HostAdapter:
        """Read an adapter. Raises `StartupError`, also if the files have another digest or change meanwhile."""
        version = version_of(directory)
        adapter = Adapter.open(directory, self.slots.model.spec)
        host = read_adapter(adapter, self.slots) if adapter.digest == digest else None
        if host is None or version_of(directory) != version:
            raise StartupError(f"the files in {directory} have changed.", "Load the adapter again.")
        device = self.slots.model.placement.device
        if device.type != "cuda":
            return host
        torch.cuda.set_device(device)  # of this thread, which would otherwise use memory of device 0
        return host.pinned()


def _reason(error: BaseException) -> str:
    """Return the reason of a failure in one line. Unexpected errors are logged with their trace."""
    if not isinstance(error, StartupError | OSError):
        _log.error("event=adapter_failed", exc_info=error)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
