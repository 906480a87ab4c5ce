"""The head's side of coming together: it waits for the other nodes, and admits each once.

A connection is a stranger until it has proved that it knows the secret (`handshake`) and said who it is (`greeting`).
Strangers end alone: they have seconds, there is a bounded number of them, and nothing they do ends the start. A node
that knows the secret but differs in its facts ends it, with the difference named on every node: no weight is read by a
group that could not serve. Once all are there nobody listens any more.
"""

import json
import logging
import selectors
import socket
import time
from collections.abc import Callable, Sequence

from workers.config import NodesConfig
from workers.distributed.nodes.greeting import (
    GO,
    REFUSED,
    WAITING,
    Facts,
    Hello,
    first_difference,
    own_host,
    refusal,
)
from workers.distributed.nodes.link import DEFAULT_MAX_BYTES, Link, LinkLostError, Peer
from workers.distributed.nodes.strangers import REFUSALS, Stranger, Strangers
from workers.errors import StartupError

# Called at least once a second with whom one waits for; what it raises ends the waiting.
OnWaiting = Callable[[str], None]

_TICK_S = 1.0
_PAUSE_S = 0.05  # after a connection that could not be accepted
_FAREWELL_S = 1.0  # for a refusal to be sent
_MAX_LINES = 32  # in the log about strangers; the rest are counted

logger = logging.getLogger("oarlock.nodes")


def admit(
    listener: socket.socket,
    nodes: NodesConfig,
    facts: Facts,
    on_waiting: OnWaiting,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> dict[int, Link]:
    """The links to nodes 1 to nnodes - 1, in their order, when all have joined. Closes `listener`, of `listen`.

    `facts`: what must be the same on all nodes (`workers.fingerprint.node_facts`). `max_bytes`: of one message later.
    Raises `StartupError` when a node is missing after `nodes.timeout_s`, or differs; all that are there are told.
    """
    admission = _Admission(listener, nodes, facts)
    try:
        links = admission.run(on_waiting)
    except BaseException as error:
        known = isinstance(error, StartupError)
        cause = error if known else StartupError("Node 0 ended while it waited for the other nodes.", "See its log.", 1)
        admission.end(cause)
        raise
    for link in links.values():
        link.max_bytes = max_bytes
    return links


def _missing_text(missing: Sequence[int], nnodes: int) -> str:
    return f"waiting for {_listed(missing)} of {nnodes}"


def _listed(numbers: Sequence[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _Admission:
    def __init__(self, listener: socket.socket, nodes: NodesConfig, facts: Facts) -> None:
        self._nodes = nodes
        self._facts = json.loads(json.dumps(facts))  # as those of others arrive
        self._name = f"node 0 ({own_host()})"
        self._listener = listener
        self._strangers = Strangers()
        self._links: dict[int, Link] = {}
        self._starts: dict[int, str] = {}  # of the nodes in `_links`
        self._selector = selectors.DefaultSelector()
        self._turned_away = 0
        self._last_reason = ""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def run(self, on_waiting: OnWaiting) -> dict[int, Link]:
        start = time.monotonic()
        tick = start
        text = ""
        while missing := [node for node in range(1, self._nodes.nnodes) if node not in self._links]:
            now = time.monotonic()
            if now - start > self._nodes.timeout_s:
                raise self._never_came(missing)
            if now >= tick or text != _missing_text(missing, self._nodes.nnodes):
                tick = now + _TICK_S
                text = _missing_text(missing, self._nodes.nnodes)
                on_waiting(text)
                self._tell_waiting(text)
            for stranger in self._strangers.expired():
                self._turn_away(stranger, "it did not say who it is in time")
            for key, _ in self._selector.select(max(0.0, min(tick - now, start + self._nodes.timeout_s - now))):
                self._serve(key.data)
        for node in sorted(self._links):
            self._send(self._links[node], GO, own_host().encode())
        for stranger in self._strangers:
            self._turn_away(stranger, "all nodes are there")
        self._selector.close()
        self._listener.close()
        return dict(sorted(self._links.items()))

    def end(self, cause: StartupError) -> None:
        """Tell every node that is there why the group does not start, and hang up."""
        for link in self._links.values():
            self._send(link, REFUSED, refusal(cause))
            link.close()
        for stranger in self._strangers:
            stranger.close()
        self._selector.close()
        self._listener.close()

    def _serve(self, who: Stranger | Link | None) -> None:
        """Something can be read: a new connection, a stranger's bytes, or the end of a node that waits."""
        if who is None:
            self._accept()
        elif isinstance(who, Link):
            self._hear_waiting(who)
        elif who in self._strangers:  # it may have gone for another one in this round
            try:
                hello = who.read(self._nodes.secret)
            except REFUSALS as error:
                self._turn_away(who, str(error))
            else:
                if hello is not None:
                    self._meet(who, hello)

    def _accept(self) -> None:
        try:
            connected, address = self._listener.accept()
        except OSError as error:  # it left before, or there are no descriptors left: it comes again
            self._count("somewhere", f"it could not be accepted: {error.strerror}")
            time.sleep(_PAUSE_S)
            return
        stranger = Stranger(connected, str(address[0]))
        self._selector.register(stranger, selectors.EVENT_READ, stranger)
        too_many = self._strangers.add(stranger)
        if too_many is not None:
            self._turn_away(too_many, "too many strangers at once")

    def _meet(self, stranger: Stranger, hello: Hello) -> None:
        """It has proved that it knows the secret."""
        link = stranger.link
        assert link is not None
        self._selector.unregister(stranger)
        self._strangers.remove(stranger)
        link.peer = Peer(hello.node, hello.host, stranger.address)
        if hello.node == 0 or (hello.nnodes == self._nodes.nnodes and not 0 < hello.node < hello.nnodes):
            why = f"{link.peer} cannot join: the other nodes are 1 to {self._nodes.nnodes - 1}."
            self._refuse(link, StartupError(why, "Give each node a --node-rank of its own."))
            return
        facts = {"number of": {"nodes": self._nodes.nnodes}, **self._facts}
        theirs = {"number of": {"nodes": hello.nnodes}, **hello.facts}
        different = first_difference(facts, self._name, theirs, str(link.peer))
        if different is not None:
            self._refuse(link, different)
            raise different
        if self._starts.get(hello.node) == hello.start:
            self._forget(self._links[hello.node], f"{link.peer} lost its connection")
        if hello.node in self._links:
            first = self._links[hello.node].peer
            why = f"{link.peer} cannot join: node {hello.node} has joined already, from {first.host}, {first.address}."
            self._refuse(link, StartupError(why, "Give each node a --node-rank of its own."))
            return
        self._links[hello.node] = link
        self._starts[hello.node] = hello.start
        self._selector.register(link, selectors.EVENT_READ, link)
        logger.info("event=node_joined node=%r", str(link.peer))

    def _hear_waiting(self, link: Link) -> None:
        """A node that waits has nothing to say: it has left."""
        try:
            message = link.receive()
            if message is None:
                return
            reason = f"{link.peer} spoke before all nodes were there"
        except LinkLostError as error:
            reason = str(error)
        self._forget(link, reason)

    def _forget(self, link: Link, reason: str) -> None:
        logger.warning("event=node_left reason=%r effect='it may join again'", reason)
        self._selector.unregister(link)
        link.close()
        if self._links.get(link.peer.node) is link:
            del self._links[link.peer.node], self._starts[link.peer.node]

    def _tell_waiting(self, text: str) -> None:
        for link in tuple(self._links.values()):
            try:
                link.send(WAITING, text.encode())
            except LinkLostError as error:
                self._forget(link, str(error))

    def _turn_away(self, stranger: Stranger, reason: str) -> None:
        self._selector.unregister(stranger)
        self._strangers.remove(stranger)
        stranger.close()
        self._count(stranger.address, reason)

    def _count(self, address: str, reason: str) -> None:
        """A line in the log, as long as there are few."""
        self._turned_away += 1
        self._last_reason = f"{address}: {reason}"
        if self._turned_away <= _MAX_LINES:
            logger.warning("event=connection_turned_away address=%s reason=%r", address, reason)
        if self._turned_away == _MAX_LINES:
            logger.warning("event=connections_turned_away count=%d effect='no more lines about them'", _MAX_LINES)

    def _refuse(self, link: Link, cause: StartupError) -> None:
        """Tell a node that it cannot join, and hang up."""
        logger.warning("event=node_refused node=%r cause=%r", str(link.peer), cause.cause)
        self._send(link, REFUSED, refusal(cause))
        link.close()

    @staticmethod
    def _send(link: Link, kind: int, payload: bytes) -> None:
        """Send to a node that may have left; who uses the link next learns that it has."""
        try:
            link.send(kind, payload)
            link.flush(_FAREWELL_S)
        except LinkLostError as error:
            logger.warning("event=node_left reason=%r", str(error))

    def _never_came(self, missing: list[int]) -> StartupError:
        names = f"{_listed(missing)} of {self._nodes.nnodes}"
        turned_away = f" Other connections turned away: {self._turned_away}, the last one from {self._last_reason}."
        return StartupError(
            f"Within {self._nodes.timeout_s:g} s {names} did not join node 0 ({own_host()})."
            + (turned_away if self._turned_away else ""),
            "Start every node with the same --master-addr, --master-port and secret; see their logs;"
            " or raise --node-timeout.",
        )
