"""Who does not know the secret cannot join, cannot stop those who do, and cannot make the head hold or say much."""

import json
import logging
import random
import socket
import struct
import threading
import time

import pytest

from tests.unit.workers.nodes.groups import SECRET, Group, Joining, hello, turned_away
from workers.distributed.nodes import strangers
from workers.distributed.nodes.greeting import HELLO, MAX_HELLO_BYTES
from workers.distributed.nodes.handshake import MAGIC, MESSAGE_BYTES, WRONG_PROTOCOL, WRONG_SECRET, Opening
from workers.distributed.nodes.link import LinkLostError


def only_the_true_node_joins(group: Group, node: Joining, links) -> None:
    assert list(links) == [1]
    links[1].send(1, b"for the true one")
    message = node.link().receive(60)
    assert message is not None and message.payload == b"for the true one"


def test_a_node_with_another_secret_ends_at_once_and_the_group_starts_without_it(caplog):
    group = Group()
    nodes: list[Joining] = []

    def meanwhile() -> None:
        wrong = group.node(1, secret=SECRET + "x")
        error = wrong.error()
        assert "have different secrets" in error.cause and "--node-secret-file" in error.fix
        nodes.append(group.node(1))

    with caplog.at_level(logging.INFO, "oarlock.nodes"):
        links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)
    assert "address=127.0.0.1 reason='it has another secret'" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "said, answer, reason",
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"", "does not speak the protocol"),
        (random.Random(1).randbytes(MESSAGE_BYTES), b"", "does not speak the protocol"),
        (MAGIC + random.Random(2).randbytes(MESSAGE_BYTES - len(MAGIC)), WRONG_SECRET, "has another secret"),
        (b"OARNODE2" + bytes(48), WRONG_PROTOCOL, "speaks another version"),
        (WRONG_SECRET, b"", "does not speak the protocol"),
    ],
)
def test_garbage_ends_alone(said, answer, reason, caplog):
    group = Group()
    nodes: list[Joining] = []

    def meanwhile() -> None:
        with group.connect() as stranger:
            stranger.sendall(said)
            assert turned_away(stranger) == answer
        nodes.append(group.node(1))

    links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)
    assert reason in caplog.text


@pytest.mark.parametrize("said", [b"", MAGIC, MAGIC + b"x" * 47], ids=["nothing", "a name", "all but a byte"])
def test_silent_and_slow_strangers_are_turned_away_in_time(said, monkeypatch, caplog):
    monkeypatch.setattr(strangers, "HANDSHAKE_S", 0.3)
    group = Group()
    nodes: list[Joining] = []

    def meanwhile() -> None:
        with group.connect() as stranger, group.connect() as slow:
            stranger.sendall(said)
            for byte in MAGIC * 3:
                try:
                    slow.send(bytes([byte]))
                except ConnectionError:
                    break
                time.sleep(0.02)
            assert turned_away(stranger) == b"" == turned_away(slow)
        nodes.append(group.node(1))

    links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)
    assert caplog.text.count("did not say who it is in time") + caplog.text.count("does not speak") == 2


def test_a_thousand_strangers_neither_stop_a_node_nor_fill_the_memory_or_the_log(caplog):
    group = Group(timeout_s=30)
    held: list[socket.socket] = []
    nodes: list[Joining] = []
    most = 0
    add = strangers.Strangers.add

    def counted(self, stranger):
        nonlocal most
        gone = add(self, stranger)
        most = max(most, sum(1 for _ in self) - (gone is not None))
        return gone

    def meanwhile() -> None:
        for _ in range(1000):
            held.append(group.connect())
        nodes.append(group.node(1))
        for _ in range(500):  # and they go on coming
            try:
                held.append(group.connect())
            except ConnectionError:  # the node has joined: nobody listens
                return

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strangers.Strangers, "add", counted)
        links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)
    assert len(held) >= 1000 and most == strangers.MAX_STRANGERS
    assert len(caplog.records) < 64
    for stranger in held:
        assert turned_away(stranger) == b""
        stranger.close()


def test_when_there_are_too_many_those_go_first_whose_address_has_most_and_who_have_shown_nothing():
    class Fake:
        def __init__(self, address: str, since: float, link: object = None) -> None:
            self.address, self.since, self.link = address, since, link

    held = strangers.Strangers()
    one = Fake("10.0.0.9", 0.0)
    many = [Fake("10.0.0.1", 1.0 + number) for number in range(strangers.MAX_STRANGERS - 2)]
    proved = Fake("10.0.0.1", 0.5, link=object())
    for stranger in (one, proved, *many):
        assert held.add(stranger) is None  # type: ignore[arg-type]
    assert held.add(Fake("10.0.0.2", 100.0)) is many[0]  # type: ignore[arg-type]


def test_recorded_messages_get_a_stranger_nowhere(monkeypatch, caplog):
    """A relay records all that a true node says, and says it again."""
    monkeypatch.setattr(strangers, "HANDSHAKE_S", 0.3)
    group = Group(3)
    nodes: list[Joining] = []
    recorded: list[bytes] = []

    def meanwhile() -> None:
        with socket.create_server(("127.0.0.1", 0)) as relay:
            nodes.append(group.node(1, port=relay.getsockname()[1]))
            node, _ = relay.accept()
        head = group.connect()

        def copy(source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
            while data := source.recv(1 << 16):
                kept.append(data)
                target.sendall(data)

        for ends in ((node, head, recorded), (head, node, [])):
            threading.Thread(target=copy, args=ends, daemon=True).start()
        while len(b"".join(recorded)) < MESSAGE_BYTES + 100:
            time.sleep(0.01)
        said = b"".join(recorded)
        with group.connect() as stranger:  # all at once
            stranger.sendall(said)
            assert len(turned_away(stranger)) == MESSAGE_BYTES
        with group.connect() as stranger:  # the opening alone
            stranger.sendall(said[:MESSAGE_BYTES])
            assert len(turned_away(stranger)) == MESSAGE_BYTES
        nodes.append(group.node(2))

    links = group.admitting(meanwhile)
    assert list(links) == [1, 2] and links[1].peer.node == 1
    assert "changed on its way" in caplog.text and "did not say who it is in time" in caplog.text


def test_a_node_that_is_cut_at_any_byte_is_turned_away_and_the_next_one_joins():
    group = Group()
    nodes: list[Joining] = []

    def meanwhile() -> None:
        for kept in range(MESSAGE_BYTES):
            with group.connect() as stranger:
                stranger.sendall(Opening(SECRET).message[:kept])
                stranger.shutdown(socket.SHUT_WR)
                assert turned_away(stranger) == b""
        length = 5 + len(hello()) + 16
        for kept in range(length):
            link = group.known()
            frame = _sealed(link, hello())
            link._socket.sendall(frame[:kept])
            link.close()
        nodes.append(group.node(1))

    links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)


@pytest.mark.parametrize(
    "frame_of, reason",
    [
        (lambda link: struct.pack("<BI", HELLO, MAX_HELLO_BYTES + 1), "announced a message of"),
        (lambda link: _sealed(link, hello(), kind=7), "does not say who it is"),
        (lambda link: _sealed(link, b"\xff"), "not JSON"),
        (lambda link: _sealed(link, b"[" * 100_000), "not JSON"),
        (lambda link: _sealed(link, b"[1]"), "not an object"),
        (lambda link: _sealed(link, b"{}"), "is missing"),
        (lambda link: _sealed(link, hello(facts=[1])), "facts are missing"),
        (lambda link: _sealed(link, json.dumps({**json.loads(hello()), "node": True}).encode()), "is missing"),
    ],
)
def test_who_knows_the_secret_but_greets_wrongly_ends_alone(frame_of, reason, caplog):
    group = Group()
    nodes: list[Joining] = []

    def meanwhile() -> None:
        link = group.known()
        link._socket.setblocking(True)
        link._socket.sendall(frame_of(link))
        with pytest.raises(LinkLostError):
            link.receive(30)
        nodes.append(group.node(1))

    links = group.admitting(meanwhile)
    only_the_true_node_joins(group, nodes[0], links)
    assert reason in caplog.text


def _sealed(link, payload: bytes, kind: int = HELLO) -> bytes:
    """The bytes of a link's first message, not sent."""
    header = struct.pack("<BI", kind, len(payload))
    return header + link._sealing.encrypt(bytes(12), payload, header)
