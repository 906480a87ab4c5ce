"""The head's links to all other nodes: a thread hears them and keeps them alive, whatever the engine is doing.

The engine's thread sends by itself, so that a step is on its way at once, and takes what has come when `fileno()` is
readable. What a link does not take at once the thread sends on.
"""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from workers.distributed.nodes.link import Buffer, Link, LinkLostError, Message
from workers.distributed.shm_ring import ChannelClosedError
from workers.worker.nodes.messages import BEAT, BEAT_S, LEAVE, Pulse

logger = logging.getLogger("oarlock.nodes")


class Arrival(NamedTuple):
    """A message of a node; or, as the last thing from it, why its link was lost."""

    node: int
    message: Message | None
    lost: str = ""


class NodeLinks:
    """Starts the thread in its constructor."""

    def __init__(self, links: Iterable[Link], on_leave: Callable[[], None]) -> None:
        """`on_leave` is called in the thread when a node's operator wants it to stop."""
        self._links = {link.peer.node: link for link in links}
        self._pulses = {node: Pulse(link) for node, link in self._links.items()}
        self._on_leave = on_leave
        self._open = dict(self._links)  # of nodes whose links are not lost
        self._arrived: deque[Arrival] = deque()
        self._arriving = threading.Lock()  # `fileno` is readable if and only if there is something to take
        self._arrived_fd, self._arrive_fd = os.pipe()
        self._wake_fd, self._waking_fd = os.pipe()
        for fd in (self._arrived_fd, self._arrive_fd, self._wake_fd, self._waking_fd):
            os.set_blocking(fd, False)
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._arrived_fd

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self._links)

    def name_of(self, node: int) -> str:
        return str(self._links[node].peer)

    # -- the engine's thread

    def send(self, kind: int, *buffers: Buffer) -> None:
        """To all nodes. Raises `ChannelClosedError` when one is lost; `take` says which, and why."""
        waits, lost = False, False
        for link in self._links.values():
            try:
                link.send(kind, *buffers)
                waits = waits or link.unsent_bytes > 0
            except LinkLostError:
                lost = True
        if waits or lost:
            _write(self._waking_fd)
        if lost:
            raise ChannelClosedError("the link to a node is lost")

    def take(self) -> list[Arrival]:
        """What has come since the last call."""
        with self._arriving:
            _drain(self._arrived_fd)
            return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self, kind: int, payload: bytes, timeout_s: float) -> None:
        """Send a last message to all nodes, wait until they have hung up, at most `timeout_s`, and hang up."""
        for link in list(self._open.values()):
            try:
                link.send(kind, payload)
            except LinkLostError as error:
                logger.warning('event=node_not_told cause="%s"', error)
        self._ending = True
        _write(self._waking_fd)
        self._thread.join(timeout_s)  # it ends when all have hung up
        for link in self._links.values():
            link.close()
        _write(self._waking_fd)
        self._thread.join()
        for fd in (self._arrived_fd, self._arrive_fd, self._wake_fd, self._waking_fd):
            os.close(fd)

    # -- the other thread

    def _run(self) -> None:
        while self._open or not self._ending:
            self._turn()

    def _turn(self) -> None:
        links = list(self._open.values())
        full = [link for link in links if link.unsent_bytes]
        wait_s = min((pulse.seconds_left for pulse in self._pulses.values()), default=BEAT_S)
        try:
            ready = select.select([self._wake_fd, *links], full, [], wait_s)[0]
        except (OSError, ValueError):  # a link was closed by the other thread: its next use says so
            ready = links
        if self._wake_fd in ready:
            _drain(self._wake_fd)
        for link in links:
            node = link.peer.node
            try:
                if link.unsent_bytes:
                    link.flush()
                while (message := link.receive()) is not None:
                    self._pulses[node].heard()
                    self._take(node, message)
                self._pulses[node].beat()
            except LinkLostError as error:
                del self._open[node], self._pulses[node]
                self._arrive(Arrival(node, None, str(error)))

    def _take(self, node: int, message: Message) -> None:
        if message.kind == LEAVE:
            logger.info('event=node_leaves node="%s"', self.name_of(node))
            self._on_leave()
        elif message.kind != BEAT:
            self._arrive(Arrival(node, message))

    def _arrive(self, arrival: Arrival) -> None:
        with self._arriving:
            self._arrived.append(arrival)
            _write(self._arrive_fd)


def _write(fd: int) -> None:
    """Make the other end of a pipe readable; a full one is already."""
    try:
        os.write(fd, b"\0")
    except BlockingIOError:
        return


def _drain(fd: int) -> None:
    try:
        os.read(fd, 1 << 16)
    except BlockingIOError:
        return
