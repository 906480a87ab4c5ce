"""A group of nodes in one process: the head in the test's thread, the others in threads of their own."""

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workers.config import NodesConfig
from workers.distributed.nodes.admission import admit
from workers.distributed.nodes.greeting import HELLO, Hello
from workers.distributed.nodes.handshake import MESSAGE_BYTES, Opening
from workers.distributed.nodes.interface import listen
from workers.distributed.nodes.joining import join
from workers.distributed.nodes.link import Link, Peer
from workers.errors import StartupError

SECRET = "a secret of the group of the tests, of more than 32 characters"
FACTS = {
    "version of": {"oarlock": "1.0", "torch": "2.13"},
    "setting": {"max_model_len": 4096, "dtype": "bfloat16"},
    "weights in": {"model.safetensors": "0123456789abcdef"},
}


def quiet(_: str) -> None:
    """Does nothing with whom one waits for."""


def changed(group: str, name: str, value: object) -> dict[str, dict[str, Any]]:
    """`FACTS` with one value changed."""
    return {**FACTS, group: {**FACTS[group], name: value}}


@dataclass
class Group:
    """Nodes that look for a head on a port of their own."""

    nnodes: int = 2
    timeout_s: float = 20.0
    listener: socket.socket = field(init=False)
    config: NodesConfig = field(init=False)

    def __post_init__(self) -> None:
        self.config = NodesConfig(0, self.nnodes, "127.0.0.1", 0, None, SECRET, self.timeout_s)
        self.listener = listen(self.config)
        self.config = replace(self.config, port=self.listener.getsockname()[1])

    def admit(self, facts: Mapping[str, Mapping[str, Any]] = FACTS, on_waiting: Callable[[str], None] = quiet):
        return admit(self.listener, self.config, facts, on_waiting)

    def node(self, rank: int, facts: Mapping[str, Mapping[str, Any]] = FACTS, **changes: Any) -> "Joining":
        """A node that joins, in a thread."""
        return Joining(replace(self.config, node_rank=rank, **changes), facts)

    def connect(self) -> socket.socket:
        """A connection that has said nothing."""
        connected = socket.create_connection((self.config.address, self.config.port))
        connected.settimeout(30)
        return connected

    def known(self, hello: bytes | None = None) -> Link:
        """A connection of somebody who knows the secret, and says `hello`."""
        connected = self.connect()
        opening = Opening(SECRET)
        connected.sendall(opening.message)
        keys = opening.finish(connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
        link = Link(connected, keys, Peer(0, "head", self.config.address))
        if hello is not None:
            link.send(HELLO, hello)
        return link

    def admitting(self, meanwhile: Callable[[], None]) -> dict[int, Link]:
        """Admit while `meanwhile` runs in a thread; what fails there fails here."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                meanwhile()
            except BaseException as error:
                failed.append(error)

        def check(_: str) -> None:
            if failed:
                raise failed[0]

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            return self.admit(on_waiting=check)
        finally:
            thread.join(30)
            check("")


def hello(node: int = 1, nnodes: int = 2, start: str = "a start", **changes: Any) -> bytes:
    """What a node says of itself."""
    return Hello(node, nnodes, f"host-{node}", start, **{"facts": FACTS, **changes}).to_bytes()


def turned_away(connected: socket.socket) -> bytes:
    """What the head said before it hung up on a connection, which it must have."""
    said = b""
    while True:
        try:
            data = connected.recv(1000)
        except ConnectionError:
            return said
        if not data:
            return said
        said += data


class Joining:
    """One node's `join`, in a thread."""

    def __init__(self, config: NodesConfig, facts: Mapping[str, Mapping[str, Any]]) -> None:
        self.phases: list[str] = []
        self._result: Link | StartupError | None = None
        self._config, self._facts = config, facts
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def link(self) -> Link:
        """Of a node that must have joined."""
        self._thread.join(30)
        assert isinstance(self._result, Link), self._result
        return self._result

    def error(self) -> StartupError:
        """Of a node that must not have joined."""
        self._thread.join(30)
        assert isinstance(self._result, StartupError), self._result
        return self._result

    def _run(self) -> None:
        try:
            self._result = join(self._config, self._facts, self.phases.append)
        except StartupError as error:
            self._result = error
