"""The other nodes' side of coming together: find the head, prove to know the secret, and wait until all are there.

A head that is not there yet, or that is busy with strangers, is asked again until the time is over; a refusal ends the
start at once.
"""

import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from workers.config import NodesConfig
from workers.distributed.nodes.greeting import (
    GO,
    HELLO,
    MAX_HELLO_BYTES,
    REFUSED,
    WAITING,
    Facts,
    Hello,
    NotAGreetingError,
    own_host,
    printable,
    read_refusal,
)
from workers.distributed.nodes.handshake import (
    MAGIC,
    MESSAGE_BYTES,
    WRONG_PROTOCOL,
    WRONG_SECRET,
    HandshakeError,
    Opening,
)
from workers.distributed.nodes.link import DEFAULT_MAX_BYTES, Link, LinkLostError, Peer
from workers.errors import StartupError
from workers.platform.network import interface_called

_RETRY_S = 0.5
_CONNECT_S = 3.0
_ANSWER_S = 5.0  # for the head's part of the handshake
_END_S = 1.0  # for an answer to the end of what was sent
_SILENCE_S = 10.0  # the head speaks once a second while it waits

logger = logging.getLogger("oarlock.nodes")


class _NotYetError(Exception):
    """The head cannot be joined now; later perhaps."""


def join(
    nodes: NodesConfig, facts: Facts, on_waiting: Callable[[str], None], max_bytes: int = DEFAULT_MAX_BYTES
) -> Link:
    """The link to the head, when all nodes have joined it. Arguments as of `admission.admit`.

    Raises `StartupError`: the head is not there in time, has another secret, differs from this node, or gave up.
    """
    deadline = time.monotonic() + nodes.timeout_s
    where = f"{nodes.address}, port {nodes.port}"
    reason = f"looking for node 0 at {where}"
    hello = Hello(nodes.node_rank, nodes.nnodes, own_host(), secrets.token_hex(8), facts).to_bytes()
    while time.monotonic() < deadline:
        on_waiting(reason)
        try:
            link = _joined(nodes, hello, on_waiting, deadline)
        except _NotYetError as error:
            if reason != (reason := str(error)):
                logger.info("event=head_not_ready reason=%r effect='trying again'", reason)
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        link.max_bytes = max_bytes
        return link
    raise StartupError(
        f"Node {nodes.node_rank} could not join node 0 at {where}, within {nodes.timeout_s:g} s: {reason}.",
        "Start node 0, and give all nodes the same --master-addr and --master-port; or raise --node-timeout.",
    )


def _joined(nodes: NodesConfig, hello: bytes, on_waiting: Callable[[str], None], deadline: float) -> Link:
    """One attempt. Raises `_NotYetError`, or `StartupError` where another attempt would not help."""
    connected = _connect(nodes, deadline)
    try:
        link = _shake_hands(connected, nodes)
    except BaseException:
        connected.close()
        raise
    try:
        link.send(HELLO, hello)
        _wait_for_all(link, on_waiting, deadline)
    except LinkLostError as error:
        link.close()
        raise _NotYetError(str(error)) from error
    except NotAGreetingError as error:
        link.close()
        raise _NotYetError(f"{link.peer} said what it should not: {error}") from error
    except BaseException:
        link.close()
        raise
    return link


def _connect(nodes: NodesConfig, deadline: float) -> socket.socket:
    limit = max(0.1, min(_CONNECT_S, deadline - time.monotonic()))
    source = None if nodes.interface is None else (interface_called(nodes.interface).address, 0)
    try:
        return socket.create_connection((nodes.address, nodes.port), limit, source_address=source)
    except OSError as error:
        raise _NotYetError(f"node 0 at {nodes.address}: {error.strerror or error}") from error


def _shake_hands(connected: socket.socket, nodes: NodesConfig) -> Link:
    """The link to the head, which has proved that it knows the secret."""
    address = str(connected.getpeername()[0])
    opening = Opening(nodes.secret)
    said = b""
    limit = time.monotonic() + _ANSWER_S
    try:
        connected.sendall(opening.message)
        while (missing := _missing_bytes(said)) > 0:
            connected.settimeout(max(0.01, limit - time.monotonic()))
            data = connected.recv(missing)
            if not data:
                break
            said += data
    except OSError as error:
        if isinstance(error, TimeoutError):
            said += _answer_to_the_end(connected)
        if not said:
            raise _NotYetError(f"node 0 at {address} did not answer: {error.strerror or error}") from error
    if said.startswith(WRONG_SECRET):
        raise _another_secret(nodes, address)
    if said.startswith(WRONG_PROTOCOL):
        raise StartupError(
            f"Node 0 at {address} speaks another version of the protocol of nodes than node {nodes.node_rank}.",
            "Install the same version of Oarlock on every host.",
        )
    if not _missing_bytes(said) and not said.startswith(MAGIC):
        raise StartupError(
            f"What answers at {address}, port {nodes.port}, is not node 0 of an Oarlock group.",
            "Check --master-addr and --master-port; torchrun's own store listens on the port before ours.",
        )
    if len(said) < MESSAGE_BYTES:
        raise _NotYetError(f"node 0 at {address} hung up before it answered")
    try:
        keys = opening.finish(said)
    except HandshakeError as error:
        raise _another_secret(nodes, address) from error
    return Link(connected, keys, Peer(0, "the head", address), MAX_HELLO_BYTES)


def _answer_to_the_end(connected: socket.socket) -> bytes:
    """What a stranger says that waits for more, such as a web server for the end of a line, once it sees the end."""
    try:
        connected.shutdown(socket.SHUT_WR)
        connected.settimeout(_END_S)
        return connected.recv(MESSAGE_BYTES)
    except OSError:
        return b""


def _missing_bytes(said: bytes) -> int:
    """How many bytes the head's answer lacks; 0 also where it is none."""
    if MAGIC.startswith(said[: len(MAGIC)]):
        return MESSAGE_BYTES - len(said)
    if any(words.startswith(said) for words in (WRONG_SECRET, WRONG_PROTOCOL)):
        return len(MAGIC) - len(said)
    return 0


def _another_secret(nodes: NodesConfig, address: str) -> StartupError:
    return StartupError(
        f"Node 0 at {address} and node {nodes.node_rank} ({own_host()}) have different secrets.",
        "Give every node the same --node-secret-file or OARLOCK_NODE_SECRET.",
    )


def _wait_for_all(link: Link, on_waiting: Callable[[str], None], deadline: float) -> None:
    text = "all nodes"
    while True:
        left = deadline - time.monotonic()
        message = link.receive(max(0.0, min(_SILENCE_S, left)))
        if message is None:
            if left > _SILENCE_S:
                raise _NotYetError(f"{link.peer} has said nothing for {_SILENCE_S:g} s")
            raise StartupError(
                f"Not all nodes joined in time: {link.peer} is {text}.",
                "Start the missing ones, see their logs; or raise --node-timeout.",
            )
        if message.kind == GO:
            link.peer = replace(link.peer, host=printable(message.payload.decode(errors="replace")))
            return
        if message.kind == REFUSED:
            raise read_refusal(message.payload)
        if message.kind != WAITING:
            raise NotAGreetingError(f"kind {message.kind}")
        text = printable(message.payload.decode(errors="replace"))
        on_waiting(text)
