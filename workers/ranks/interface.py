"""The network interface for what goes between nodes, and the socket that the head's store listens on."""

import socket
from collections.abc import Callable

from oarlock.workers.config import NodesConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.platform.network import (
    Interface,
    check_port_is_free,
    interface_called,
    interface_towards,
    resolved,
)

_NAME_WAIT_S = 30.0  # for a name service to learn of a host that has just been started
_BACKLOG = 512


def own_interface(nodes: NodesConfig, on_wait: Callable[[], object] = lambda: None) -> Interface:
    """The interface that was named, or else the one that leads to the head; on the head, the one with its address.

    `on_wait` is called while the head's name is not known yet. Raises `StartupError`.
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
    """The head's listening socket, on one address of this host. Raises `StartupError`, as where the port is taken."""
    own = own_interface(nodes)
    if nodes.port:  # 0 lets the system choose
        check_port_is_free(own.address, nodes.port)
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    return socket.create_server((own.address, nodes.port), family=family, backlog=_BACKLOG)
