"""Reads of files that may never end, as on a network file system whose server is gone.

A thread that the kernel blocks cannot be interrupted. So each read has a daemon thread, for which neither the end of
the process nor another read waits. The thread notes its progress: a read is *stalled* if it has made none for a while,
however long the whole read takes. Nobody waits for a stalled read any more. If it goes on later, it ends at its next
note.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from oarlock.base.errors import StartupError

T = TypeVar("T")
OnRead = Callable[[], None]  # called by a read after each piece; raises `ReadStoppedError` to end it

# Seconds without progress after which nobody waits for a read any more. Network file systems are silent for some
# seconds if their server is busy or changes.
STALL_S = 30.0
_MOST_BLOCKED = 32  # threads that may be blocked in the kernel
_POLL_S = 0.05


class ReadStoppedError(Exception):
    """Ends a read, in its own thread, for which nobody waits any more."""


class StalledReadError(StartupError):
    """Nothing could be read from `path` for `STALL_S`."""

    def __init__(self, path: str) -> None:
        cause = f"nothing could be read from {path} for {STALL_S:g} seconds."
        super().__init__(cause, "Check its disk or network file system, then try again.")
        self.path = path


def ignore_progress() -> None:
    """Do nothing: progress of a read that nobody watches."""


class WatchedRead(Generic[T]):
    """One read in a thread of its own."""

    def __init__(self, function: Callable[[OnRead], T], path: str) -> None:
        """Take `function`, which reads from `path`, and calls its argument after each piece."""
        self.path = path
        self.result = Future[T]()
        self._function = function
        self._last_s: float | None = None  # time of the last progress; None: it has not begun
        self._is_stopped = False

    def start(self) -> None:
        """Begin to read. Never raises."""
        self._last_s = time.monotonic()
        self.result.set_running_or_notify_cancel()
        try:
            threading.Thread(target=self._run, name="files", daemon=True).start()
        except RuntimeError as error:  # the process has as many threads as it may have
            self.result.set_exception(error)

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress; 0 if the read has not begun, or has ended."""
        return 0.0 if self._last_s is None or self.result.done() else time.monotonic() - self._last_s

    @property
    def is_stalled(self) -> bool:
        return self.idle_s >= STALL_S

    def wait(self, update: Callable[[], object] = ignore_progress) -> T:
        """Return the result of the read, for which the calling thread waits; `update` is called from time to time.

        Raises the errors of the read, and `StalledReadError`.
        """
        while not wait((self.result,), _POLL_S).done:
            if self.is_stalled:
                raise StalledReadError(self.path)
            update()
        return self.result.result()

    def stop(self) -> None:
        """End the read at its next note of progress."""
        self._is_stopped = True

    def _note_progress(self) -> None:
        if self._is_stopped:
            raise ReadStoppedError(self.path)
        self._last_s = time.monotonic()

    def _run(self) -> None:
        try:
            value = self._function(self._note_progress)
        except BaseException as error:  # whoever waits for the result gets it
            self.result.set_exception(error)
        else:
            self.result.set_result(value)


def run_watched(function: Callable[[OnRead], T], path: str) -> T:
    """Return the result of `function`, which reads `path`, as `WatchedReads.run` does, from a thread that may wait."""
    read = WatchedRead(function, path)
    read.start()
    return read.wait()


class LeftReads:
    """Reads that nobody waits for any more, while their threads may be blocked."""

    def __init__(self) -> None:
        self._reads: list[WatchedRead] = []

    def add(self, read: WatchedRead) -> None:
        """Stop `read` and leave its thread to itself."""
        read.stop()
        self._reads = [one for one in self._reads if not one.result.done()]
        if not read.result.done():
            self._reads.append(read)

    def check(self, path: str) -> None:
        """Raise `StalledReadError` if a read from `path` is still stalled, since a further read would occupy one more
        thread, or if very many reads are."""
        self._reads = [one for one in self._reads if not one.result.done()]
        if len(self._reads) >= _MOST_BLOCKED or any(one.path == path and one.is_stalled for one in self._reads):
            raise StalledReadError(path)


class WatchedReads:
    """Reads that coroutines of one event loop wait for."""

    def __init__(self, at_once: int = 8) -> None:
        """`at_once`: reads that run at the same time, without stalled ones."""
        self._permits = asyncio.Semaphore(at_once)
        self._left = LeftReads()

    async def run(self, function: Callable[[OnRead], T], path: str) -> T:
        """Return the result of `function`, which another thread computes. Cancelling the call ends the read.

        `function` reads from `path`, and calls its argument after each piece. Raises its errors, and
        `StalledReadError`; at once, if an earlier read from `path` is still stalled.
        """
        self._left.check(path)
        async with self._permits:
            self._left.check(path)  # again, after the wait
            read = WatchedRead(function, path)
            read.start()
            future = asyncio.wrap_future(read.result)
            try:
                while not future.done():
                    if read.is_stalled:
                        raise StalledReadError(path)
                    await asyncio.wait((future,), timeout=_POLL_S)
                return future.result()
            finally:
                if not future.done():
                    future.cancel()  # so that a late error is not reported as never retrieved
                    self._left.add(read)
