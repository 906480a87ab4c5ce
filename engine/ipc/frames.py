"""Length-prefixed frames on a byte stream.

    magic u32 | payload bytes u32 | payload        (little-endian)

`FrameSocket` is the engine's end: it sends and receives frames, and never blocks. Does not know the meaning of a
payload (`messages.py`).
"""

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

MAX_FRAME_BYTES = 256 << 20
_MAGIC = 0x4D52414F  # "OARM"
_PREFIX = struct.Struct("<II")

_RECV_BYTES = 1 << 18
_MAX_RECV_PER_CALL = 4 << 20  # limit, so that many requests at once do not keep the loop from running steps
_FULL_BYTES = 16 << 20
_UNREAD_LIMIT_S = 60.0  # a frontend that reads nothing for this time counts as gone


class FrameError(ValueError):
    """The bytes are not a frame, or the payload is not a valid message."""


def as_frame(payload: bytes) -> bytes:
    """Return the bytes of one frame. Raises `FrameError` if it is too large for a reader."""
    if len(payload) > MAX_FRAME_BYTES:
        raise _too_large(len(payload))
    return _PREFIX.pack(_MAGIC, len(payload)) + payload


class FrameReader:
    """Parser of frames from bytes in pieces of any size. After a `FrameError` the stream must not be read further."""

    def __init__(self) -> None:
        self._begun = bytearray()  # the beginning of a frame that is not complete
        self._needed = _PREFIX.size  # no frame can be complete with fewer bytes

    def feed(self, data: bytes) -> list[memoryview]:
        """Return the payloads of all frames that `data` completes. Raises `FrameError`.

        They are views of `data`, or of a buffer that is not used again.
        """
        buffer: bytes | bytearray = data
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return []
            buffer, self._begun = self._begun, bytearray()
        payloads: list[memoryview] = []
        view, start, end = memoryview(buffer), 0, _PREFIX.size
        while end <= len(buffer):
            magic, size = _PREFIX.unpack_from(buffer, start)
            if magic != _MAGIC:
                raise FrameError(f"not a frame: it begins with {magic:#010x}")
            if size > MAX_FRAME_BYTES:
                raise _too_large(size)
            end = start + _PREFIX.size + size
            if end <= len(buffer):
                payloads.append(view[start + _PREFIX.size : end])
                start, end = end, end + _PREFIX.size
        self._needed = end - start
        if start < len(buffer):
            self._begun += view[start:]
        return payloads

    def finish(self) -> None:
        """Check the end of the stream. Raises `FrameError` if it ended inside a frame."""
        if self._begun:
            raise FrameError(f"the stream ended inside a frame, after {len(self._begun)} bytes of it")


def _too_large(size: int) -> FrameError:
    return FrameError(f"a payload of {size} bytes is too large: at most {MAX_FRAME_BYTES}")


class FrameSocketClosedError(Exception):
    """The frontend is gone."""


class FrameSocket:
    """Socket that buffers frames which the frontend has not read yet. While `is_full`, the loop should send nothing
    more."""

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

    def receive(self) -> list[memoryview]:
        """Return the payloads of all frames that have arrived. Raises `FrameSocketClosedError` at end-of-file,
        `FrameError` on other bytes."""
        payloads: list[memoryview] = []
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
            payloads += self._reader.feed(data)
            received += len(data)
        return payloads

    def send(self, frame: bytes) -> None:
        """Send as much of `frame` as the socket takes now; keep the rest for `flush`."""
        self._pending += frame
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes. Raises `FrameSocketClosedError` if the frontend is gone or reads no
        more."""
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
        """Measure how long sending is blocked, from the first blocked attempt on, not from before a long step. Raises
        `FrameSocketClosedError` after `_UNREAD_LIMIT_S`."""
        now = self._clock()
        if sent_some or self._blocked_s is None:
            self._blocked_s = now
        elif now - self._blocked_s > _UNREAD_LIMIT_S:
            raise FrameSocketClosedError(f"it has not read for {_UNREAD_LIMIT_S:g} s")

    def close(self) -> None:
        with suppress(OSError):  # the other end may have gone first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
