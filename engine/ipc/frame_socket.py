"""Socket to the frontend, at the engine's end: sends and receives frames, and never blocks.

Does not know what the frames mean.
"""

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from oarlock.engine.ipc.frames import Frame, FrameReader

_RECV_BYTES = 1 << 18
_MAX_RECV_PER_CALL = 4 << 20  # so that many requests at once do not keep the loop from running steps
_FULL_BYTES = 16 << 20
_UNREAD_LIMIT_S = 60.0  # a frontend that reads nothing for so long counts as gone


class FrameSocketClosedError(Exception):
    """The frontend is gone."""


class FrameSocket:
    """Buffers frames that the frontend has not read yet. While `is_full`, the loop should send nothing more."""

    def __init__(
        self, sock: socket.socket, *, full_bytes: int = _FULL_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader()
        self._pending = bytearray()
        self._full_bytes = full_bytes
        self._clock = clock
        self._blocked_s: float | None = None  # when the frontend stopped reading the pending bytes

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        return len(self._pending) >= self._full_bytes

    def receive(self) -> list[Frame]:
        """All frames that have arrived. Raises `FrameSocketClosedError` at end-of-file, `FrameError` on other bytes."""
        frames: list[Frame] = []
        received = 0
        while received < _MAX_RECV_PER_CALL:
            try:
                data = self._sock.recv(_RECV_BYTES)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise FrameSocketClosedError(str(error)) from error
            if not data:
                raise FrameSocketClosedError("end of file")
            frames += self._reader.feed(data)
            received += len(data)
        return frames

    def send(self, frame: bytes) -> None:
        """Send as much of `frame` as the socket takes now; keep the rest for `flush`."""
        self._pending += frame
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes. `FrameSocketClosedError` when the frontend is gone or reads no more."""
        if not self._pending:
            return
        sent = 0
        try:
            with memoryview(self._pending) as view:
                while sent < len(view):
                    sent += self._sock.send(view[sent:])
            self._blocked_s = None
        except BlockingIOError:
            self._record_blocked(sent_some=sent > 0)  # the rest goes when the socket is writable again
        except ConnectionError as error:
            raise FrameSocketClosedError(str(error)) from error
        del self._pending[:sent]

    def _record_blocked(self, *, sent_some: bool) -> None:
        """Measure how long sending is blocked: between blocked attempts, not during a long step before the first."""
        now = self._clock()
        if sent_some or self._blocked_s is None:
            self._blocked_s = now
        elif now - self._blocked_s > _UNREAD_LIMIT_S:
            raise FrameSocketClosedError(f"it has not read for {_UNREAD_LIMIT_S:g} s")

    def close(self) -> None:
        with suppress(OSError):  # the other end may have gone first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
