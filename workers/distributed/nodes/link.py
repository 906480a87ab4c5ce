"""A connection between two nodes: framed messages, encrypted and authenticated with the keys of its handshake.

    kind u8 | length u32 of what is sealed, little endian | sealed | tag, 16 bytes

AES-256-GCM; what stands in clear is authenticated too. The nonce counts a direction's messages and is not sent, so a
message that was changed, left out, repeated, moved or sent back ends the link. A year of steps is far below what one
key may seal.

Nothing blocks unless it is asked to. What the socket does not take at once waits in memory, up to a bound: beyond it
the other side counts as lost. Any thread may send; one thread receives. Does not know what messages mean.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from workers.distributed.nodes.noise import TAG_BYTES, Keys, nonce
from workers.distributed.shm_ring import ChannelClosedError

FIRST_RESERVED_KIND: Final = 0xF0  # kinds from here on belong to admission
DEFAULT_MAX_BYTES: Final = 64 << 20
_HEADER = struct.Struct("<BI")
_READ_BYTES = 256 << 10
# seconds until the system gives up a peer that does not acknowledge; heartbeats are quicker
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 5, 2, 3
_USER_TIMEOUT_MS = 10_000

Buffer = bytes | bytearray | memoryview


class LinkLostError(ChannelClosedError):
    """The other node is gone, does not read, or said what it cannot have said. The text says which, and names it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a link, for messages to users."""

    node: int
    host: str  # its own name for itself
    address: str  # where it was reached, or reached us from

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}, {self.address})"


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    payload: bytes


class Link:
    """One end. `fileno()` lets `select` wait for messages; `has_message` says what `select` cannot see."""

    def __init__(
        self,
        connected: socket.socket,
        keys: Keys,
        peer: Peer,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Takes over `connected`. `max_bytes` bounds one message's payload in either direction."""
        connected.setblocking(False)
        set_options(connected)
        self.peer = peer
        self.max_bytes = max_bytes
        self._socket = connected
        self._sealing, self._opening = AESGCM(keys.sending), AESGCM(keys.receiving)
        self._num_sent = self._num_received = 0
        self._buffer = bytearray(_READ_BYTES)  # grows to the largest message that comes
        self._begin = self._end = 0  # of what was read into it and not taken
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._lock = threading.Lock()  # of what is sent
        self._lost: str | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """Of this host, on the way to the other node."""
        return str(self._socket.getsockname()[0])

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait for the socket to take them: then call `flush` once it is writable."""
        return self._unsent_bytes

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read already."""
        return self._frame_bytes() is not None

    def send(self, kind: int, *buffers: Buffer) -> None:
        """Seal `buffers` as one message, and send what the socket takes; the rest waits for `flush` or the next `send`.

        The buffers may change afterwards. Raises `LinkLostError`, also when more than two of the largest messages wait.
        """
        payload = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        length = memoryview(payload).nbytes
        assert length <= self.max_bytes, f"a message of {length} bytes, the limit is {self.max_bytes}"
        with self._lock:
            self._check()
            header = _HEADER.pack(kind, length)
            sealed = self._sealing.encrypt(nonce(self._num_sent), payload, header)
            self._num_sent += 1
            self._unsent += memoryview(header), memoryview(sealed)
            self._unsent_bytes += len(header) + len(sealed)
            self._write()
            if self._unsent_bytes > 2 * (self.max_bytes + _READ_BYTES):
                raise self._fail("does not read what it is sent")

    def flush(self, timeout_s: float | None = 0.0) -> bool:
        """Send what waits, as much as the socket takes within `timeout_s` (None: all of it); whether nothing is left.

        Raises `LinkLostError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._check()
                self._write()
            if not self._unsent_bytes or not _wait(self._socket, deadline, write=True):
                return not self._unsent_bytes

    def receive(self, timeout_s: float | None = 0.0) -> Message | None:
        """The next message, or None when there is no whole one within `timeout_s` (None: wait for ever).

        Messages that were read together come one at a time: call again until None. Raises `LinkLostError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._check()
            size = self._frame_bytes()
            if size is not None:
                return self._take(size)
            if not self._read() and not _wait(self._socket, deadline):
                return None

    def close(self, reason: str = "is closed here") -> None:
        """Hang up. What the socket did not take is lost: `flush` first. Later calls raise `LinkLostError`."""
        with self._lock:
            self._fail(reason)
        with contextlib.suppress(OSError):  # it may be gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _frame_bytes(self) -> int | None:
        """The length of the first frame, if it was read whole."""
        if self._end - self._begin < _HEADER.size:
            return None
        size = self._announced_bytes()
        return size if self._end - self._begin >= size else None

    def _announced_bytes(self) -> int:
        """The length of the first frame, by its header."""
        _, length = _HEADER.unpack_from(self._buffer, self._begin)
        if length > self.max_bytes:
            raise self._fail(f"announced a message of {length} bytes, the limit is {self.max_bytes}")
        return _HEADER.size + length + TAG_BYTES

    def _take(self, size: int) -> Message:
        with memoryview(self._buffer)[self._begin : self._begin + size] as frame:
            header = bytes(frame[: _HEADER.size])
            try:
                payload = self._opening.decrypt(nonce(self._num_received), frame[_HEADER.size :], header)
            except InvalidTag:
                raise self._fail("sent a message that was changed on its way") from None
        self._begin += size
        if self._begin == self._end:
            self._begin = self._end = 0
        self._num_received += 1
        return Message(header[0], payload)

    def _read(self) -> bool:
        """Read what is there behind what was read; whether anything was. Only while there is no whole frame."""
        self._make_room()
        try:
            with memoryview(self._buffer)[self._end :] as room:
                count = self._socket.recv_into(room)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise self._fail(f"is gone: {error.strerror or error}") from error
        if not count:
            raise self._fail("has hung up")
        self._end += count
        return True

    def _make_room(self) -> None:
        """Let the whole of a frame that has begun fit, by its header if that is there."""
        held = self._end - self._begin
        size = self._announced_bytes() if held >= _HEADER.size else _HEADER.size
        if self._begin + size > len(self._buffer):
            self._buffer[:held] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, held
        if size > len(self._buffer):
            self._buffer += bytes(size - len(self._buffer))

    def _write(self) -> None:
        """Give the socket what waits, as much as it takes."""
        while self._unsent:
            try:
                sent = self._socket.sendmsg(list(self._unsent)[:64])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise self._fail(f"is gone: {error.strerror or error}") from error
            self._unsent_bytes -= sent
            while sent:
                first = self._unsent.popleft()
                if sent < len(first):
                    self._unsent.appendleft(first[sent:])
                sent -= min(sent, len(first))

    def _check(self) -> None:
        if self._lost is not None:
            raise LinkLostError(f"{self.peer} {self._lost}")

    def _fail(self, reason: str) -> LinkLostError:
        """Remember why the link is of no more use; the first reason stays."""
        self._lost = self._lost or reason
        return LinkLostError(f"{self.peer} {self._lost}")


def set_options(connected: socket.socket) -> None:
    """Send small messages at once, and notice a host that is gone although nothing is sent."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def _wait(connected: socket.socket, deadline: float | None, *, write: bool = False) -> bool:
    """Whether the socket can be read (written) before the deadline."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        return False
    if connected.fileno() < 0:  # closed by another thread, as who asks will find
        return True
    poll = select.poll()
    poll.register(connected, select.POLLOUT if write else select.POLLIN)
    return bool(poll.poll(None if left is None else left * 1000))
