"""One node among several: its interface, the facts that all nodes must agree on, and the end of their group."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oarlock.base.errors import EXIT_BUG, EXIT_OK, StartupError
from oarlock.workers.config import NodesConfig
from oarlock.workers.errors import WorkerError
from oarlock.workers.platform.network import (
    Interface,
    check_port_is_free,
    interface_called,
    interface_towards,
    resolved,
)

_NAME_WAIT_S = 30.0  # time for a name service to learn of a host that was just started
_BACKLOG = 512


def own_interface(nodes: NodesConfig, on_wait: Callable[[], object] = lambda: None) -> Interface:
    """Return the configured interface, or else the interface that leads to the head node. On the head it must have the
    head's address.

    `on_wait` is called while the head's name cannot be resolved yet. Raises `StartupError`.
    """
    head = resolved(nodes.address, min(_NAME_WAIT_S, nodes.timeout_s), on_wait)
    if nodes.interface is not None:
        return interface_called(nodes.interface)
    own = interface_towards(head)
    if nodes.node_rank == 0 and own.address != head:
        raise StartupError(
            f"The head node's address {nodes.address} ({head}) is not one of this host, which is node 0.",
            "Start node 0 on that host, give --master-addr this host's address, or set --node-interface.",
        )
    return own


def listen(nodes: NodesConfig) -> socket.socket:
    """Return the head's listening socket, on one address of this host. Raises `StartupError`, also if the port is
    taken."""
    own = own_interface(nodes)
    if nodes.port:  # 0 lets the system choose
        check_port_is_free(own.address, nodes.port)
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    return socket.create_server((own.address, nodes.port), family=family, backlog=_BACKLOG)


# Group -> name -> JSON value. The first group that differs is reported, so groups that cause others to differ come
# first.
Facts = Mapping[str, Mapping[str, Any]]

_FIXES = {
    "number of": "Start every node with the same --nnodes.",
    "version of": "Install the same versions on every host.",
    "weights in": "Give every node the same model.",
}
_MAX_SHOWN = 128  # characters of a value


def first_difference(ours: Facts, our_name: str, theirs: Facts, their_name: str) -> StartupError | None:
    """Return an error with the first value that differs and both nodes' values; None if all are equal."""
    for group in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(group, {}), theirs.get(group, {})
        for name in [*one, *(name for name in other if name not in one)]:
            if (name in one, one.get(name)) != (name in other, other.get(name)):
                here, there = (_shown(held[name]) if name in held else "nothing" for held in (one, other))
                return StartupError(
                    f"The nodes differ in the {printable(f'{group} {name}')}: {here} on {our_name}, {there} on "
                    f"{their_name}.",
                    _FIXES.get(group, "Start every node with the same options."),
                )
    return None


def own_host() -> str:
    """Return this host's own name."""
    return printable(socket.gethostname())


def printable(text: str) -> str:
    """Return another node's text, made safe for one line of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:_MAX_SHOWN])


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value))


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a group. All nodes exit with `exit_code`. `fix` is set if the start failed."""

    exit_code: int
    cause: str = ""
    fix: str = ""

    @staticmethod
    def of(failure: Exception | None) -> "Ending":
        if failure is None:
            return Ending(EXIT_OK)
        if isinstance(failure, StartupError):
            return Ending(failure.exit_code, failure.cause, failure.fix)
        if isinstance(failure, WorkerError):
            return Ending(failure.exit_code, str(failure))
        return Ending(EXIT_BUG, str(failure) or type(failure).__name__)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(payload: bytes) -> "Ending":
        return Ending(**json.loads(payload))
