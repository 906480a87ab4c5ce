"""A TCP connection between two ranks that share no memory.

Plain bytes without a copy, since layers wait for them: a sum of some kilobytes takes little more than the network's own
round trip, where gloo's threads take 10 to 20 times as long (`benchmarks/node_sums.py`). They are not encrypted. That
the peer is a rank of this group both have proven when they met (`meeting.py`).
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.distributed.shm_all_reduce import PeerLostError

_SPIN_S = 50e-6  # of looks at a socket before the thread sleeps: waking up takes about as long


class PeerSocket:
    """One end. `rank` is the peer's."""

    def __init__(self, connection: socket.socket, rank: int, timeout_s: float, *, shares_cores: bool = False) -> None:
        """`connection`: belongs to this from now on. `timeout_s`: without a byte from a peer that is waited for."""
        self.rank = rank
        self.timeout_s = timeout_s
        self.spin_s = 0.0 if shares_cores else _SPIN_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def try_send(self, data: memoryview) -> int:
        """How many bytes the system took; 0: none now. Raises `PeerLostError`."""
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error

    def try_receive(self, into: memoryview) -> int:
        """How many bytes came; 0: none yet. Raises `PeerLostError`."""
        try:
            count = self._connection.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise PeerLostError(f"rank {self.rank} closed its connection")
        return count

    def late(self) -> PeerLostError:
        """The error when the peer has sent nothing for too long."""
        return PeerLostError(f"rank {self.rank} sent nothing within {self.timeout_s} s")

    def close(self) -> None:
        self._connection.close()

    def _lost(self, error: OSError) -> PeerLostError:
        return PeerLostError(f"the connection to rank {self.rank} is lost: {error}")


def exchange(peers: Sequence[PeerSocket], mine: Sequence[memoryview], theirs: Sequence[memoryview]) -> None:
    """Send `mine[i]` to `peers[i]` and fill `theirs[i]` (bytes) from it, all at once: neither side waits for the other
    to read first. Raises `PeerLostError`."""
    out, into = list(mine), list(theirs)
    spin_until = deadline = 0.0  # from the first look on
    while True:
        moved = False
        for index, peer in enumerate(peers):
            if len(out[index]) and (count := peer.try_send(out[index])):
                out[index], moved = out[index][count:], True
            if len(into[index]) and (count := peer.try_receive(into[index])):
                into[index], moved = into[index][count:], True
        waiting = [index for index in range(len(peers)) if len(out[index]) or len(into[index])]
        if not waiting:
            return
        now = time.monotonic()
        if moved or deadline == 0.0:
            spin_until, deadline = now + peers[0].spin_s, now + peers[0].timeout_s
        elif now > spin_until:
            watched = select.poll()
            for index in waiting:
                events = (select.POLLOUT if len(out[index]) else 0) | (select.POLLIN if len(into[index]) else 0)
                watched.register(peers[index], events)
            if not watched.poll(1000 * max(0.0, deadline - now)):
                raise peers[waiting[0]].late()


class SendingThread:
    """Sends to one peer without making the caller wait: what the system does not take at once, a thread sends."""

    def __init__(self, peer: PeerSocket) -> None:
        self._peer = peer
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._error: PeerLostError | None = None
        self._thread: threading.Thread | None = None

    def send(self, *parts: memoryview) -> None:
        """`parts` may be overwritten once this returns. Raises `PeerLostError`, also for what was to be sent before."""
        with self._changed:
            if self._error is not None:
                raise self._error
            for part in parts:
                sent = 0
                while not self._waiting and sent < len(part) and (count := self._peer.try_send(part[sent:])):
                    sent += count
                if sent < len(part):
                    self._waiting.append(bytes(part[sent:]))
            if self._waiting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="pipeline-send", daemon=True)
                    self._thread.start()
                self._changed.notify()

    def _run(self) -> None:
        """Until an error: the process ends without waiting for this thread."""
        try:
            while True:
                with self._changed:
                    while not self._waiting:
                        self._changed.wait()
                    first = self._waiting[0]
                exchange([self._peer], [memoryview(first)], [memoryview(b"")])
                with self._changed:
                    self._waiting.popleft()  # only now: what is sent later must not go ahead of it
        except PeerLostError as error:
            with self._changed:
                self._error = error


def data_of(x: Tensor) -> memoryview:
    """The bytes of `x` (contiguous, on the CPU), in place."""
    assert x.is_contiguous()
    return memoryview(x.view(-1).view(torch.uint8).numpy())
