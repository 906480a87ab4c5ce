"""Ranks that share no memory find each other, know each other by the token, and are not kept waiting by strangers."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from workers.distributed.peers import meeting
from workers.distributed.peers.meeting import Answering, meet
from workers.distributed.peers.peer_socket import PeerSocket, SendingThread, exchange
from workers.distributed.shm_all_reduce import PeerLostError

TOKEN = "0123456789abcdef" * 2
ADDRESS = "127.0.0.1"
NOTHING = memoryview(b"")


class Directory:
    """A store of one process. `on_set`: called with the address that a rank listens on, before others can read it."""

    def __init__(self, on_set: Callable[[str, int], None] = lambda host, port: None) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._on_set = on_set

    def set(self, key: str, value: str) -> None:
        host, port = value.split()
        self._on_set(host, int(port))
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=30)
            return self._values[key].encode()


def met(directory: Directory, size: int, tokens: dict[int, str] | None = None, timeout_s: float = 30) -> list:
    """For each rank its connections to all others by rank, or what it raised."""
    results: list = [None] * size

    def run(rank: int) -> None:
        others = set(range(size)) - {rank}
        try:
            results[rank] = meet(directory, rank, others, ADDRESS, (tokens or {}).get(rank, TOKEN), timeout_s)
        except PeerLostError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def pair() -> tuple[PeerSocket, PeerSocket]:
    first, second = met(Directory(), 2)
    return first[1], second[0]


def test_every_rank_is_connected_with_those_that_it_names() -> None:
    for rank, peers in enumerate(met(Directory(), 4)):
        assert list(peers) == [other for other in range(4) if other != rank]
        assert all(peer.rank == other for other, peer in peers.items())
        for peer in peers.values():
            peer.close()


def test_strangers_keep_nobody_waiting(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_S", 3600.0)  # given to a silent stranger
    before = set(threading.enumerate())
    strangers: list[socket.socket] = []

    def come(host: str, port: int) -> None:
        for number in range(60):
            strangers.append(socket.create_connection((host, port)))
            if number % 3:  # the others say nothing
                strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * number)

    with caplog.at_level(logging.WARNING, "oarlock.rank"):
        first, second = met(Directory(come), 2)
    assert isinstance(first[1], PeerSocket) and isinstance(second[0], PeerSocket)
    assert any("it does not have the token of this group" in line for line in caplog.messages)
    assert set(threading.enumerate()) == before  # nobody is answered any more
    for stranger in strangers:
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1 << 12):
                continue  # until it is over
    for connection in [*strangers, first[1], second[0]]:
        connection.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerLostError, match=r"rank 1 did not connect within 0\.05 s"):
        meet(Directory(), 0, {1}, ADDRESS, TOKEN, 0.05)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_token_is_refused_by_both_sides(wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [TOKEN, TOKEN]
    tokens[wrong] = "another" * 5
    listener = socket.create_server((ADDRESS, 0))
    directory = Directory()
    directory.set("oarlock/listening/0", f"{ADDRESS} {listener.getsockname()[1]}")
    with caplog.at_level(logging.WARNING, "oarlock.rank"), Answering(listener, 0, {1}, tokens[0]) as answering:
        with pytest.raises(PeerLostError, match="does not have the token of this group"):
            meet(directory, 1, {0}, ADDRESS, tokens[1], 30)
        while not caplog.messages:
            time.sleep(0.01)  # its own thread says it; the test's limit ends this
        assert "event=stranger" in caplog.messages[0]
        with pytest.raises(queue.Empty):
            answering.take(0)


def test_a_listener_that_repeats_what_it_hears_proves_nothing() -> None:
    """The proofs of the two sides differ, so one cannot be sent back."""
    with socket.create_server((ADDRESS, 0)) as listener:
        directory = Directory()
        directory.set("oarlock/listening/0", f"{ADDRESS} {listener.getsockname()[1]}")

        def reflect() -> None:
            connection, _ = listener.accept()
            with connection:
                while heard := connection.recv(1 << 12):
                    connection.sendall(heard + bytes(32))

        reflecting = threading.Thread(target=reflect)
        reflecting.start()
        with pytest.raises(PeerLostError, match="is not rank 0 of this group"):
            meet(directory, 1, {0}, ADDRESS, TOKEN, 5)
        reflecting.join(60)


def test_both_sides_may_send_more_than_the_system_takes_before_they_read() -> None:
    first, second = pair()
    count = 32 << 20
    sent = bytes([1]) * count, bytes([2]) * count
    got = bytearray(count), bytearray(count)
    thread = threading.Thread(target=exchange, args=([second], [memoryview(sent[1])], [memoryview(got[1])]))
    thread.start()
    exchange([first], [memoryview(sent[0])], [memoryview(got[0])])
    thread.join(30)
    assert got[0] == sent[1] and got[1] == sent[0]
    first.close()
    second.close()


def test_what_is_sent_without_waiting_arrives_whole_and_in_order() -> None:
    first, second = pair()
    sending = SendingThread(first)
    messages = [bytes([number]) * size for number, size in enumerate((5, 8 << 20, 1, 8 << 20, 3))]
    for message in messages:  # nobody reads yet
        buffer = bytearray(message)
        sending.send(memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # may be overwritten
    for message in messages:
        into = bytearray(len(message))
        exchange([second], [NOTHING], [memoryview(into)])
        assert into == message
    first.close()
    second.close()


@pytest.mark.parametrize("size", [1, 64 << 20], ids=["waiting for it", "sending to it"])
def test_a_peer_that_ends_is_named(size: int) -> None:
    first, second = pair()
    second.close()
    with pytest.raises(PeerLostError, match="rank 1"):
        exchange([first], [memoryview(bytes(size))], [memoryview(bytearray(1))])
    first.close()


def test_a_silent_peer_is_named_in_time() -> None:
    first, second = pair()
    first.timeout_s = 0.05
    with pytest.raises(PeerLostError, match=r"rank 1 sent nothing within 0\.05 s"):
        exchange([first], [NOTHING], [memoryview(bytearray(1))])
    first.close()
    second.close()
