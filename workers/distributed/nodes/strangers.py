"""Connections that have not proved anything yet: a bounded number, each for a bounded time, none in another's way."""

import socket
import time
from collections import Counter
from collections.abc import Iterator

from workers.distributed.nodes.greeting import HELLO, MAX_HELLO_BYTES, Hello, NotAGreetingError
from workers.distributed.nodes.handshake import (
    MAGIC,
    MESSAGE_BYTES,
    WRONG_PROTOCOL,
    WRONG_SECRET,
    HandshakeError,
    answer,
)
from workers.distributed.nodes.link import Link, LinkLostError, Peer

MAX_STRANGERS = 64
HANDSHAKE_S = 5.0  # from the connection to the hello, round trips between continents included
_NAME_BYTES = len(MAGIC) - 1


class Stranger:
    """One connection, from its first byte to its hello."""

    def __init__(self, connected: socket.socket, address: str) -> None:
        connected.setblocking(False)
        self.address = address
        self.since = time.monotonic()
        self.link: Link | None = None  # once it has shown an opening that was made with the secret
        self._socket = connected
        self._opening = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self, secret: str) -> Hello | None:
        """Go on with what has arrived; its hello, when it has proved that it knows the secret and said who it is.

        Raises `HandshakeError`, `LinkLostError`, `NotAGreetingError` or `OSError` when it is of no use.
        """
        if self.link is None:
            self._read_opening(secret)
        if self.link is None:
            return None
        message = self.link.receive()
        if message is None:
            return None
        if message.kind != HELLO:
            raise NotAGreetingError("it does not say who it is")
        return Hello.from_bytes(message.payload)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        else:
            self._socket.close()

    def _read_opening(self, secret: str) -> None:
        # No more than the opening: nothing may follow before our answer.
        try:
            data = self._socket.recv(MESSAGE_BYTES - len(self._opening))
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise HandshakeError("it hung up")
        self._opening += data
        name = self._opening[: len(MAGIC)]
        if not MAGIC.startswith(name):
            if name[:_NAME_BYTES] == MAGIC[:_NAME_BYTES]:
                self._socket.send(WRONG_PROTOCOL)
                raise HandshakeError("it speaks another version of the protocol of nodes")
            raise HandshakeError("it does not speak the protocol of nodes")
        if len(self._opening) < MESSAGE_BYTES:
            return
        try:
            reply, keys = answer(secret, self._opening)
        except HandshakeError:
            self._socket.send(WRONG_SECRET)
            raise
        self._socket.send(reply)
        self.link = Link(self._socket, keys, Peer(-1, "stranger", self.address), MAX_HELLO_BYTES)


class Strangers:
    """All of them. When there are too many, one of the address that has most goes, those without the secret first."""

    def __init__(self) -> None:
        self._held: list[Stranger] = []  # oldest first

    def __iter__(self) -> Iterator[Stranger]:
        return iter(tuple(self._held))

    def add(self, stranger: Stranger) -> Stranger | None:
        """Returns one that must go."""
        self._held.append(stranger)
        if len(self._held) <= MAX_STRANGERS:
            return None
        counts = Counter(each.address for each in self._held)
        return min(self._held[:-1], key=lambda each: (each.link is not None, -counts[each.address], each.since))

    def remove(self, stranger: Stranger) -> None:
        self._held.remove(stranger)

    def expired(self) -> list[Stranger]:
        limit = time.monotonic() - HANDSHAKE_S
        return [each for each in self._held if each.since <= limit]


REFUSALS = (HandshakeError, LinkLostError, NotAGreetingError, OSError)
