"""Length-prefixed frames on a byte stream: a JSON head, then int32 and float32 numbers. No pickle.

    magic u32 | head bytes u32 | ints u32 | floats u32 | head | ints | floats        (little-endian)

Does not know what a frame means (`messages.py`) nor how bytes arrive (`frame_socket.py`, `client.py`).
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 8 << 20
MAX_FRAME_BYTES = 256 << 20
_MAGIC = 0x4652414F  # "OARF"
_PREFIX = struct.Struct("<IIII")
_ITEM_BYTES = 4

if array("i").itemsize != _ITEM_BYTES or array("f").itemsize != _ITEM_BYTES or sys.byteorder != "little":
    raise ImportError("frames need a little-endian machine with 4-byte C ints")


class FrameError(ValueError):
    """The bytes are not a frame, or the frame is not a valid message."""


@dataclass(slots=True)
class Frame:
    """One message, whose kind is `head["kind"]`."""

    head: dict[str, Any]
    ints: array = field(default_factory=lambda: array("i"))
    floats: array = field(default_factory=lambda: array("f"))

    @property
    def kind(self) -> str:
        return self.head["kind"]


def encode(head: dict[str, Any], ints: Iterable[int] = (), floats: Iterable[float] = ()) -> bytes:
    """The bytes of one frame. Raises `FrameError` for numbers over 32 bits, or a frame larger than a reader accepts."""
    try:
        int_bytes, float_bytes = array("i", ints).tobytes(), array("f", floats).tobytes()
    except (OverflowError, TypeError) as error:
        raise FrameError(f"numbers that a frame cannot hold: {error}") from error
    text = json.dumps(head, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, len(text), len(int_bytes) // _ITEM_BYTES, len(float_bytes) // _ITEM_BYTES)
    _check_sizes(len(text), len(int_bytes) + len(float_bytes))
    return b"".join((prefix, text, int_bytes, float_bytes))


class FrameReader:
    """Reads frames from bytes in pieces of any size. After a `FrameError` the stream must not be read further."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._missing = _PREFIX.size  # no frame can be complete with fewer bytes

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """All frames that `data` completes. Raises `FrameError`."""
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= self._missing:
            _, head, ints, floats = sizes = _PREFIX.unpack_from(self._buffer, start)
            _check_prefix(sizes)
            self._missing = _PREFIX.size + head + _ITEM_BYTES * (ints + floats)
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


def _check_prefix(sizes: tuple[int, int, int, int]) -> None:
    magic, head, ints, floats = sizes
    if magic != _MAGIC:
        raise FrameError(f"not a frame: it begins with {magic:#010x}")
    _check_sizes(head, _ITEM_BYTES * (ints + floats))


def _check_sizes(head_bytes: int, number_bytes: int) -> None:
    if head_bytes > MAX_HEAD_BYTES or head_bytes + number_bytes > MAX_FRAME_BYTES:
        raise FrameError(
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
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the head is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise FrameError("the head is not an object with a kind")
    return Frame(fields, int_array, float_array)
