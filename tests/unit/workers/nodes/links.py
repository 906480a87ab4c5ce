"""Two ends of a link over TCP on this host, with what an attacker between them could do."""

import socket
from dataclasses import dataclass

from workers.distributed.nodes.handshake import Opening, answer
from workers.distributed.nodes.link import Link, Peer
from workers.distributed.nodes.noise import Keys

SECRET = "a secret of more than 32 characters, for tests only"


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def keys() -> tuple[Keys, Keys]:
    """Of a node, and of its head."""
    opening = Opening(SECRET)
    reply, head = answer(SECRET, opening.message)
    return opening.finish(reply), head


def pair(max_bytes: int = 1 << 20) -> tuple[Link, Link]:
    """The node's end, and the head's."""
    of_node, of_head = keys()
    ours, theirs = connected()
    node = Link(ours, of_node, Peer(0, "host-a", "10.0.0.1"), max_bytes)
    return node, Link(theirs, of_head, Peer(1, "host-b", "10.0.0.2"), max_bytes)


@dataclass
class Tapped:
    """A node whose bytes arrive here, and a head that gets what is sent from here."""

    node: Link
    from_node: socket.socket
    to_head: socket.socket
    head: Link

    @staticmethod
    def make(max_bytes: int = 1 << 20) -> "Tapped":
        of_node, of_head = keys()
        ours, from_node = connected()
        to_head, theirs = connected()
        node = Link(ours, of_node, Peer(0, "host-a", "10.0.0.1"), max_bytes)
        return Tapped(node, from_node, to_head, Link(theirs, of_head, Peer(1, "host-b", "10.0.0.2"), max_bytes))

    def frame(self, kind: int, payload: bytes) -> bytes:
        """The bytes of a message that the node sends."""
        self.node.send(kind, payload)
        return self.from_node.recv(5 + len(payload) + 16, socket.MSG_WAITALL)
