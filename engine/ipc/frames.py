"""Length-prefixed frames on a byte stream: a JSON head, then int32 and float32 values. No pickle.

    magic u32 | head bytes u32 | ints u32 | floats u32 | head | ints | floats        (little-endian)

`FrameSocket` is the engine's end: it sends and receives frames, and never blocks. Does not know the meaning of a frame
(`messages.py`).
"""

import json
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

MAX_HEAD_BYTES = 8 << 20
MAX_FRAME_BYTES = 256 << 20
_MAGIC = 0x4652414F  # "OARF"
_PREFIX = struct.Struct("<IIII")
_ITEM_BYTES = 4
_SHORT_HEAD_BYTES, _KEPT_HEADS = 40, 1024

if array("i").itemsize != _ITEM_BYTES or array("f").itemsize != _ITEM_BYTES or sys.byteorder != "little":
    raise ImportError("frames need a little-endian machine with 4-byte C ints")
_RECV_BYTES = 1 << 18
_MAX_RECV_PER_CALL = 4 << 20  # limit, so that many requests at once do not keep the loop from running steps
_FULL_BYTES = 16 << 20
_UNREAD_LIMIT_S = 60.0  # a frontend that reads nothing for this time counts as gone


class FrameError(ValueError):
    """The bytes are not a frame, or the frame is not a valid message."""


@dataclass(slots=True)
class Frame:
    """One message, whose kind is `head["kind"]`."""

    head: dict[str, Any]
    ints: array = field(default_factory=partial(array, "i"))
    floats: array = field(default_factory=partial(array, "f"))

    @property
    def kind(self) -> str:
        return self.head["kind"]


def encode(head: dict[str, Any], ints: Iterable[int] = (), floats: Iterable[float] = ()) -> bytes:
    """Return the bytes of one frame. Raises `FrameError` if a number exceeds 32 bits, or if the frame is too large for
    a reader."""
    try:
        int_bytes, float_bytes = array("i", ints).tobytes(), array("f", floats).tobytes()
    except (OverflowError, TypeError) as error:
        raise FrameError(f"numbers that a frame cannot hold: {error}") from error
    return join(head_text(head), int_bytes, float_bytes)


def head_text(head: dict[str, Any]) -> bytes:
    """Return the bytes of a head."""
    return json.dumps(head, separators=(",", ":")).encode()


def join(text: bytes, ints: bytes, floats: bytes = b"") -> bytes:
    """Return the bytes of one frame from its parts. Raises `FrameError` if it is too large for a reader."""
    if len(text) > MAX_HEAD_BYTES or len(text) + len(ints) + len(floats) > MAX_FRAME_BYTES:
        raise _too_large(len(text), len(ints) + len(floats))
    prefix = _PREFIX.pack(_MAGIC, len(text), len(ints) // _ITEM_BYTES, len(floats) // _ITEM_BYTES)
    return b"".join((prefix, text, ints, floats))


class FrameReader:
    """Parser of frames from bytes in pieces of any size. After a `FrameError` the stream must not be read further."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._missing = _PREFIX.size  # no frame can be complete with fewer bytes

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Return all frames that `data` completes. Raises `FrameError`."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= self._missing:
            magic, head, ints, floats = _PREFIX.unpack_from(self._buffer, start)
            if magic != _MAGIC:
                raise FrameError(f"not a frame: it begins with {magic:#010x}")
            number_bytes = _ITEM_BYTES * (ints + floats)
            if head > MAX_HEAD_BYTES or head + number_bytes > MAX_FRAME_BYTES:
                raise _too_large(head, number_bytes)
            self._missing = _PREFIX.size + head + number_bytes
            if len(self._buffer) - start < self._missing:
                break
            frames.append(_decode(self._buffer, start + _PREFIX.size, head, ints, floats))
            start += self._missing
            self._missing = _PREFIX.size
        if start:
            del self._buffer[:start]
        return frames

    def finish(self) -> None:
        """Check the end of the stream. Raises `FrameError` if it ended inside a frame."""
        if self._buffer:
            raise FrameError(f"the stream ended inside a frame, after {len(self._buffer)} bytes of it")


def _too_large(head_bytes: int, number_bytes: int) -> FrameError:
    return FrameError(
        f"a head of {head_bytes} and {number_bytes} bytes of numbers is too large: "
        f"at most {MAX_HEAD_BYTES}, and {MAX_FRAME_BYTES} together"
    )


def _decode(buffer: bytearray, start: int, head: int, ints: int, floats: int) -> Frame:
    with memoryview(buffer) as view:
        text = bytes(view[start : start + head])
        ints_at = start + head
        floats_at = ints_at + _ITEM_BYTES * ints
        int_array, float_array = array("i"), array("f")
        int_array.frombytes(view[ints_at:floats_at])
        float_array.frombytes(view[floats_at : floats_at + _ITEM_BYTES * floats])
    fields = _short_head(text) if head <= _SHORT_HEAD_BYTES else _read_head(text)
    return Frame(fields.copy(), int_array, float_array)


def _read_head(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the head is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise FrameError("the head is not an object with a kind")
    return fields


_short_head = lru_cache(_KEPT_HEADS)(_read_head)  # most heads of events equal an earlier one


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

    def receive(self) -> list[Frame]:
        """Return all frames that have arrived. Raises `FrameSocketClosedError` at end-of-file, `FrameError` on other
        bytes."""
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
