"""How ranks that share no memory find and know each other: who listens where is in a store that all can read and write,
and each side of a connection proves that it has the token."""

import contextlib
import hashlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import Protocol

from workers.distributed.peers.peer_socket import PeerSocket
from workers.distributed.shm_all_reduce import PeerLostError

logger = logging.getLogger("oarlock.rank")

_NONCE = 16  # bytes
_PROOF = 32
_HELLO = struct.Struct(f"<I{_NONCE}s")  # a rank, and what its peer must prove the token with
_HANDSHAKE_S = 3.0  # a stranger that says nothing is let go after this
_MOST_OPEN = 128  # connections of which it is not known yet whose they are
_RETRY_S = 0.05


class Store(Protocol):
    """A directory for all ranks: `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """Waits until the key is set."""
        ...


def meet(
    store: Store,
    rank: int,
    peers: Collection[int],
    address: str,
    token: str,
    timeout_s: float,
    *,
    shares_cores: bool = False,
) -> dict[int, PeerSocket]:
    """One connection to each of the ranks `peers`, which call this too. `address`: of this host, to listen on until all
    have come. Of two ranks the higher one connects. Raises `PeerLostError`."""
    assert len(token) >= 32 and rank not in peers
    deadline = time.monotonic() + timeout_s
    higher = {peer for peer in peers if peer > rank}
    found: dict[int, socket.socket] = {}
    with ExitStack() as opened, ExitStack() as listening:
        if higher:
            listener = socket.create_server((address, 0), family=_family(address), backlog=_MOST_OPEN)
            answering = listening.enter_context(Answering(listener, rank, higher, token))
            store.set(_key(rank), f"{address} {listener.getsockname()[1]}")
        for peer in sorted(set(peers) - higher):
            host, port = store.get(_key(peer)).decode().split()
            found[peer] = opened.enter_context(_connect(host, int(port), address, rank, peer, token, deadline))
        while missing := higher - found.keys():
            try:
                peer, connection = answering.take(max(1e-3, deadline - time.monotonic()))
            except queue.Empty:
                raise PeerLostError(f"rank {min(missing)} did not connect within {timeout_s} s") from None
            opened.enter_context(connection)
            found.setdefault(peer, connection)
        listening.close()
        opened.pop_all()  # the caller's from here on
    return {peer: PeerSocket(found[peer], peer, timeout_s, shares_cores=shares_cores) for peer in sorted(found)}


def _key(rank: int) -> str:
    return f"oarlock/listening/{rank}"


def _connect(host: str, port: int, source: str, rank: int, peer: int, token: str, deadline: float) -> socket.socket:
    """Raises `PeerLostError`."""
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), max(1e-3, left), source_address=(source, 0))
            break
        except OSError as error:
            if left <= _RETRY_S:
                raise PeerLostError(f"rank {peer} cannot be reached at {host}: {error}") from error
            time.sleep(_RETRY_S)
    try:
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(_HELLO.pack(rank, mine))
        theirs = _HELLO.unpack(_exactly(connection, _HELLO.size, deadline))
        _check(_exactly(connection, _PROOF, deadline), _proof(token, b"listens", peer, rank, mine, theirs[1]))
        connection.sendall(_proof(token, b"connects", rank, peer, mine, theirs[1]))
        if theirs[0] != peer:
            raise ValueError(f"it is rank {theirs[0]}")
    except (OSError, ValueError) as error:
        connection.close()
        raise PeerLostError(f"who answers at {host} is not rank {peer} of this group: {error}") from error
    return connection


class Answering:
    """The ranks that connect, each answered in a thread of its own: silent strangers keep nobody waiting.

    A context manager: once left, nothing listens, its threads have ended, and what nobody took is closed.
    """

    def __init__(self, listener: socket.socket, rank: int, expected: Collection[int], token: str) -> None:
        """`listener`: belongs to this from now on."""
        self._listener = listener
        self._rank, self._expected, self._token = rank, expected, token
        self._answered: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(_MOST_OPEN)
        self._open: dict[socket.socket, threading.Thread] = {}  # of which it is not known yet whose they are
        self._changing = threading.Lock()  # of the two names around it
        self._left = False
        self._accepting = threading.Thread(target=self._accept, name="meeting", daemon=True)

    def __enter__(self) -> "Answering":
        self._accepting.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changing:
            self._left = True
            answering = list(self._open.items())
        for waiting in (self._listener, *(connection for connection, _ in answering)):
            with contextlib.suppress(OSError):  # it is over
                waiting.shutdown(socket.SHUT_RDWR)  # wakes its thread
        for thread in (self._accepting, *(thread for _, thread in answering)):
            thread.join()
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._answered.get_nowait()[1].close()

    def take(self, timeout_s: float) -> tuple[int, socket.socket]:
        """The next rank, and the connection to it, which is the caller's. Raises `queue.Empty`."""
        return self._answered.get(timeout=timeout_s)

    def _accept(self) -> None:
        while True:
            self._room.acquire()
            try:
                connection, where = self._listener.accept()
            except OSError:
                return  # nobody listens any more
            thread = threading.Thread(target=self._try, args=(connection, where[0]), daemon=True)
            with self._changing:
                if self._left:
                    connection.close()
                    return
                self._open[connection] = thread
                thread.start()

    def _try(self, connection: socket.socket, host: str) -> None:
        peer: int | None = None
        try:
            peer = _answer(connection, self._rank, self._expected, self._token)
        except (OSError, ValueError) as error:
            if not self._left:
                logger.warning("event=stranger address=%s cause=%r", host, str(error))
        with self._changing:
            del self._open[connection]  # before another may take it
            if peer is None or self._left:
                connection.close()
            else:
                self._answered.put((peer, connection))
        self._room.release()


def _answer(connection: socket.socket, rank: int, expected: Collection[int], token: str) -> int:
    """The rank that has connected. Raises `ValueError` or `OSError`: a stranger, or a rank that was not expected."""
    deadline = time.monotonic() + _HANDSHAKE_S
    mine = secrets.token_bytes(_NONCE)
    peer, theirs = _HELLO.unpack(_exactly(connection, _HELLO.size, deadline))
    connection.sendall(_HELLO.pack(rank, mine) + _proof(token, b"listens", rank, peer, theirs, mine))
    _check(_exactly(connection, _PROOF, deadline), _proof(token, b"connects", peer, rank, theirs, mine))
    if peer not in expected:
        raise ValueError(f"rank {peer} is not expected")
    return peer


def _proof(token: str, side: bytes, speaker: int, listener: int, connecting: bytes, listening: bytes) -> bytes:
    """What shows that `speaker` has the token: bound to the side, both ranks and both nonces."""
    said = side + struct.pack("<II", speaker, listener) + connecting + listening
    return hmac.digest(token.encode(), said, hashlib.sha256)


def _check(given: bytes, right: bytes) -> None:
    if not hmac.compare_digest(given, right):
        raise ValueError("it does not have the token of this group")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(count - len(got))
        if not part:
            raise ValueError("it closed the connection")
        got += part
    return got
