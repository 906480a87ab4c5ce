"""A node looks for its head: it waits for one that is not there yet, and names what is wrong with one that is."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.workers.nodes.groups import FACTS, SECRET, Group, quiet
from workers.config import NodesConfig
from workers.distributed.nodes import joining
from workers.distributed.nodes.greeting import GO, HELLO, WAITING
from workers.distributed.nodes.handshake import MAGIC, MESSAGE_BYTES, WRONG_PROTOCOL, Opening, answer
from workers.distributed.nodes.interface import listen
from workers.distributed.nodes.joining import join
from workers.distributed.nodes.link import Link, LinkLostError, Peer
from workers.errors import StartupError


class FakeHead:
    """Answers each connection in turn by a function of its own."""

    def __init__(self, *acts: Callable[[socket.socket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.config = NodesConfig(1, 2, "127.0.0.1", self._listener.getsockname()[1], None, SECRET, timeout_s=10.0)
        self._acts = acts
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for act in self._acts:
            connected, _ = self._listener.accept()
            with connected:
                act(connected)
        self._listener.close()


def until_it_hangs_up(connected: socket.socket) -> None:
    while connected.recv(1000):
        pass


def silent(connected: socket.socket) -> None:
    until_it_hangs_up(connected)


def hang_up(connected: socket.socket) -> None:
    connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL)


def reset(connected: socket.socket) -> None:
    """Closes with something unread."""


def echo(connected: socket.socket) -> None:
    connected.sendall(connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
    until_it_hangs_up(connected)


def web_server(connected: socket.socket) -> None:
    connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL)
    connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    until_it_hangs_up(connected)


def newer(connected: socket.socket) -> None:
    connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL)
    for byte in WRONG_PROTOCOL:
        connected.sendall(bytes([byte]))


def one_byte_at_a_time(connected: socket.socket) -> None:
    for byte in MAGIC * 7:
        try:
            connected.send(bytes([byte]))
        except ConnectionError:
            return
        time.sleep(0.03)


def as_head(connected: socket.socket) -> Link:
    reply, keys = answer(SECRET, connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
    connected.sendall(reply)
    link = Link(connected.dup(), keys, Peer(1, "node", "127.0.0.1"))
    message = link.receive(60)
    assert message is not None and message.kind == HELLO
    return link


def waits_silently(connected: socket.socket) -> None:
    link = as_head(connected)
    link.send(WAITING, b"waiting for node 2 of 3")
    with pytest.raises(LinkLostError):  # the node has left
        link.receive(60)


def says_what_it_should_not(connected: socket.socket) -> None:
    as_head(connected).send(99, b"")


def lets_go(connected: socket.socket) -> None:
    as_head(connected).send(GO, b"host-a")


def changes_a_byte(connected: socket.socket) -> None:
    reply, _ = answer(SECRET, connected.recv(MESSAGE_BYTES, socket.MSG_WAITALL))
    connected.sendall(reply[:-1] + bytes([reply[-1] ^ 1]))


@pytest.mark.parametrize(
    "act, cause",
    [
        (echo, "have different secrets"),
        (changes_a_byte, "have different secrets"),
        (web_server, "is not node 0 of an Oarlock group"),
        (newer, "speaks another version of the protocol"),
    ],
)
def test_what_cannot_become_right_ends_the_start_at_once(act, cause):
    with pytest.raises(StartupError, match=cause) as raised:
        join(FakeHead(act).config, FACTS, quiet)  # a second connection would be refused for 10 s
    assert raised.value.fix


@pytest.mark.parametrize(
    "act",
    [hang_up, reset, silent, one_byte_at_a_time, waits_silently, says_what_it_should_not],
    ids=lambda f: f.__name__,
)
def test_a_head_that_fails_is_asked_again(act, monkeypatch):
    monkeypatch.setattr(joining, "_ANSWER_S", 0.3)
    monkeypatch.setattr(joining, "_SILENCE_S", 0.3)
    monkeypatch.setattr(joining, "_RETRY_S", 0.05)
    link = join(FakeHead(act, lets_go).config, FACTS, quiet)
    assert str(link.peer) == "node 0 (host-a, 127.0.0.1)"


def test_a_web_server_that_waits_for_the_end_of_a_line_is_known(monkeypatch):
    """The handshake's bytes are random: a line may end among them, or not."""

    def patient(connected: socket.socket) -> None:
        until_it_hangs_up(connected)
        connected.sendall(b"HTTP/1.0 400 Bad request syntax\r\n\r\n")

    monkeypatch.setattr(joining, "_ANSWER_S", 0.1)
    with pytest.raises(StartupError, match="is not node 0 of an Oarlock group"):
        join(FakeHead(patient).config, FACTS, quiet)


def test_a_head_that_starts_later_is_found():
    group = Group()
    group.listener.close()
    node = group.node(1)
    while not any("Connection refused" in phase for phase in node.phases):
        time.sleep(0.01)
    group.listener = listen(group.config)
    links = group.admit()
    assert links[1].peer.node == 1 and node.link().peer.node == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_a_head_that_never_comes_is_named_with_what_went_wrong(address):
    group = Group(timeout_s=0.3)
    group.listener.close()
    node = group.node(1, address=address)
    error = node.error()
    assert f"could not join node 0 at {address}, port {group.config.port}, within 0.3 s" in error.cause
    assert "Connection refused" in error.cause or address in error.cause.split("within")[1]
    assert "--node-timeout" in error.fix


def test_a_silent_head_is_named(monkeypatch):
    monkeypatch.setattr(joining, "_ANSWER_S", 0.1)
    monkeypatch.setattr(joining, "_RETRY_S", 0.01)
    config = replace(FakeHead(silent, silent, silent, silent, silent, silent).config, timeout_s=0.3)
    with pytest.raises(StartupError, match="did not answer"):
        join(config, FACTS, quiet)


def test_a_node_that_waits_for_others_gives_up_in_time():
    def waits(connected: socket.socket) -> None:
        link = as_head(connected)
        link.send(WAITING, b"waiting for node 2 of 3\x1b[31m")
        with pytest.raises(LinkLostError):
            link.receive(60)

    config = replace(FakeHead(waits).config, timeout_s=0.3)
    with pytest.raises(StartupError, match=r"Not all nodes joined in time: .* waiting for node 2 of 3\?\[31m"):
        join(config, FACTS, quiet)


def test_what_the_caller_raises_ends_the_waiting():
    group = Group()
    group.listener.close()

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        join(replace(group.config, node_rank=1), FACTS, stop)


def test_a_node_speaks_from_the_interface_it_was_given():
    group = Group()
    node = group.node(1, interface="127.0.0.2")
    links = group.admit()
    assert links[1].peer.address == "127.0.0.2" and node.link()


def test_an_opening_is_of_the_length_that_the_head_reads():
    assert len(Opening(SECRET).message) == MESSAGE_BYTES
