"""The batches of `--batch-dir`, from the moment that no other server has the directory.

A server may start while the one before it still finishes its requests: it serves all else, and goes on with the batches
when the other has ended, however it did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from oarlock.engine.errors import StartupError
from oarlock.server.endpoints.batches.directory import BatchDirectory
from oarlock.server.endpoints.batches.runner import BatchRunner
from oarlock.server.errors import HttpError, retry_after
from oarlock.server.observability.logs import event, logger

_POLL_S = 0.5
_RETRY_S = 5
_log = logger("batch")


class Takeover:
    """Waits for the directory where another server has it."""

    def __init__(self, directory: BatchDirectory, open_runner: Callable[[], BatchRunner]) -> None:
        """`open_runner`: is called once the directory is ours. Raises `StartupError`, as it does."""
        self._directory = directory
        self._open_runner = open_runner
        self._runner = open_runner() if directory.take() else None
        self._waiting: asyncio.Task[None] | None = None
        self._failure: str | None = None

    @property
    def runner(self) -> BatchRunner:
        """Raises `HttpError` (503) as long as another server has the directory."""
        if self._runner is not None:
            return self._runner
        message = "Another server still has the directory of --batch-dir; this one waits for its end. Retry then."
        raise HttpError(503, self._failure or message, code="batch_dir_in_use", headers=retry_after(_RETRY_S))

    @property
    def ended_requests(self) -> Mapping[str, int]:
        """For metrics."""
        return {"answered": 0, "failed": 0} if self._runner is None else self._runner.ended_requests

    def by_status(self) -> Mapping[str, int]:
        """For metrics."""
        return {} if self._runner is None else self._runner.by_status()

    def start(self) -> None:
        """The engine is there."""
        if self._runner is not None:
            self._runner.start()
        else:
            _log.warning(event("batch_dir_waiting", path=str(self._directory.path), cause="another server has it"))
            self._waiting = asyncio.create_task(self._wait())

    async def stop(self) -> None:
        """Answer nothing more."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        if self._runner is not None:
            await self._runner.stop()

    async def close(self) -> None:
        """Give the directory back. A second call changes nothing."""
        await self.stop()
        if self._runner is not None:
            await self._runner.close()
        self._directory.close()

    async def _wait(self) -> None:
        begun = time.monotonic()
        while not self._directory.take():
            await asyncio.sleep(_POLL_S)
        try:
            # Thousands of descriptions may be read.
            runner = await asyncio.get_running_loop().run_in_executor(None, self._open_runner)
        except StartupError as error:
            _log.error(event("batch_dir_failed", cause=error.cause))
            self._failure = f"{error.cause} {error.fix}"
            self._directory.close()
            return
        self._runner = runner
        runner.start()
        _log.info(event("batch_dir_taken", path=str(self._directory.path), waited_s=time.monotonic() - begun))
