"""Threads of a rank that read adapters: one at a time, unless the disk of that one is slow.

Reading and converting an adapter takes at most one core from the steps that run meanwhile. A read that waits for its
disk takes none, so then the next one begins.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from oarlock.base.watched_reads import LeftReads, OnRead, StalledReadError, WatchedRead
from oarlock.workers.lora.adapter_slots import HostAdapter

Read = Callable[[str, Path, OnRead], HostAdapter]  # digest, directory, called after each piece
_SLOW_S = 1.0  # without progress, before another read begins


class AdapterReads:
    """Reads of one rank. All methods belong to the thread of the steps."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()  # of all fields below
        self._waiting: deque[WatchedRead[HostAdapter]] = deque()
        self._turn: WatchedRead[HostAdapter] | None = None  # the read whose end or stop others wait for
        self._running: list[WatchedRead[HostAdapter]] = []
        self._left = LeftReads()

    def begin(self, digest: str, directory: str) -> WatchedRead[HostAdapter]:
        """Read an adapter as soon as it is its turn. Return the read at once."""

        def run(on_read: OnRead) -> HostAdapter:
            torch.set_num_threads(1)  # torch would start further threads for large tensors, on the cores of the steps
            return self._read(digest, Path(directory), on_read)

        read = WatchedRead(run, directory)
        read.result.add_done_callback(lambda _: self.update())
        with self._lock:
            self._waiting.append(read)
        self.update()
        return read

    def update(self) -> None:
        """Begin the next read if no other one is at work. Called from time to time, also by threads that have ended."""
        with self._lock:
            begin = self._take()
        if begin is not None:
            begin()  # may call this method

    def _take(self) -> Callable[[], None] | None:
        """Return the begin of the next read, or its end if its directory is known to be unreadable now."""
        if self._turn is not None and (self._turn.result.done() or self._turn.idle_s >= _SLOW_S):
            self._turn = None
        self._running = [one for one in self._running if not one.result.done()]
        if self._turn is not None or not self._waiting:
            return None
        read = self._waiting.popleft()
        try:
            self._left.check(read.path)
        except StalledReadError as error:
            return partial(read.result.set_exception, error)
        self._turn = read
        self._running.append(read)
        return read.start

    def leave(self, read: WatchedRead[HostAdapter]) -> None:
        """Wait for a read no longer. It ends as soon as the disk lets it."""
        with self._lock:
            if read in self._waiting:
                self._waiting.remove(read)
                return
            self._left.add(read)

    def close(self) -> None:
        """Leave all reads."""
        with self._lock:
            self._waiting.clear()
            for read in self._running:
                self._left.add(read)
