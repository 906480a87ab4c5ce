"""A link carries messages whole, once and in order, or ends; nothing that anybody sends is taken for a message."""

import random
import select
import struct
import threading

import numpy as np
import pytest

from tests.unit.workers.nodes.links import Tapped, pair
from workers.distributed.nodes.link import Link, LinkLostError

WAIT_S = 10.0


def received(link: Link, timeout_s: float = WAIT_S) -> tuple[int, bytes]:
    message = link.receive(timeout_s)
    assert message is not None
    return message.kind, message.payload


def test_messages_of_all_kinds_of_buffers_arrive_whole_and_in_order():
    node, head = pair()
    array = np.arange(1000, dtype="<i8")
    node.send(0)
    node.send(1, b"")
    node.send(2, b"one", bytearray(b" two"), memoryview(b" three"))
    node.send(255, memoryview(array).cast("B"))
    node.send(4, b"head ", array.data.cast("B"))
    array[:] = 0  # what was sent does not change
    expected = np.arange(1000, dtype="<i8").tobytes()
    assert [received(head) for _ in range(5)] == [
        (0, b""),
        (1, b""),
        (2, b"one two three"),
        (255, expected),
        (4, b"head " + expected),
    ]
    assert head.receive() is None and not head.has_message


def test_what_was_read_together_is_told_from_what_select_sees():
    node, head = pair()
    for number in range(3):
        node.send(number, b"x" * 100)
    assert received(head) == (0, b"x" * 100)
    assert head.has_message
    assert not select.select([head], [], [], 0)[0]  # all was read at once
    assert [received(head)[0], received(head)[0]] == [1, 2]
    assert not head.has_message


def test_random_sizes_in_both_directions_at_once():
    pieces = random.Random(5)
    sizes = [pieces.choice([0, 1, 100, 70_000, 400_000]) + pieces.randrange(50) for _ in range(60)]
    ends = pair()

    def send_all(link: Link) -> None:
        for number, size in enumerate(sizes):
            link.send(number, bytes([number]) * size)
            link.flush(None)

    threads = [threading.Thread(target=send_all, args=(link,), daemon=True) for link in ends]
    for thread in threads:
        thread.start()
    for number, size in enumerate(sizes):
        for link in ends:
            assert received(link) == (number, bytes([number]) * size)


def test_many_threads_may_send():
    node, head = pair()
    threads = [
        threading.Thread(target=lambda kind=kind: [node.send(kind, b"%d" % n) for n in range(200)]) for kind in range(4)
    ]
    for thread in threads:
        thread.start()
    found: dict[int, list[bytes]] = {kind: [] for kind in range(4)}
    for _ in range(800):
        kind, payload = received(head)
        found[kind].append(payload)
        node.flush()
    assert all(payloads == [b"%d" % n for n in range(200)] for payloads in found.values())


def test_a_message_that_comes_byte_by_byte_is_whole_only_at_its_last_byte():
    tapped = Tapped.make()
    frame = tapped.frame(7, b"slowly")
    for byte in frame[:-1]:
        tapped.to_head.send(bytes([byte]))
        assert tapped.head.receive(0.001) is None
    tapped.to_head.send(frame[-1:])
    assert received(tapped.head) == (7, b"slowly")


def test_a_connection_cut_at_any_byte_ends_the_link_and_gives_no_message():
    length = len(Tapped.make().frame(7, b"cut"))
    for kept in range(length):
        tapped = Tapped.make()
        tapped.to_head.sendall(tapped.frame(7, b"cut")[:kept])
        tapped.to_head.close()
        with pytest.raises(LinkLostError, match=r"node 1 \(host-b, 10\.0\.0\.2\) has hung up"):
            tapped.head.receive(WAIT_S)


def test_a_changed_byte_at_any_position_ends_the_link_and_gives_no_message():
    length = len(Tapped.make().frame(7, b"changed"))
    for position in range(length):
        tapped = Tapped.make(max_bytes=1 << 20)
        frame = bytearray(tapped.frame(7, b"changed"))
        frame[position] ^= 1
        tapped.to_head.sendall(frame)
        tapped.to_head.close()  # a larger length waits for bytes that do not come
        with pytest.raises(LinkLostError, match=r"changed on its way|announced|hung up"):
            tapped.head.receive(WAIT_S)
        with pytest.raises(LinkLostError):
            tapped.head.send(1, b"nothing goes after that")


@pytest.mark.parametrize("attack", ["repeated", "left out", "swapped", "sent back", "of another link"])
def test_whole_frames_in_the_wrong_place_end_the_link(attack):
    tapped = Tapped.make()
    first, second = tapped.frame(1, b"first"), tapped.frame(2, b"second")
    tapped.head.send(1, b"first")
    back = tapped.to_head.recv(1000)
    right, wrong = {
        "repeated": (first, first),
        "left out": (b"", second),
        "swapped": (b"", second + first),
        "sent back": (b"", back),
        "of another link": (b"", Tapped.make().frame(1, b"first")),
    }[attack]
    tapped.to_head.sendall(right + wrong)
    if right:
        assert received(tapped.head) == (1, b"first")
    with pytest.raises(LinkLostError, match="changed on its way"):
        tapped.head.receive(WAIT_S)


def test_a_message_that_is_too_large_is_not_waited_for():
    tapped = Tapped.make(max_bytes=1000)
    assert tapped.frame(1, bytes(1000))
    with pytest.raises(AssertionError, match="the limit is 1000"):
        tapped.node.send(1, bytes(1001))
    tapped.to_head.sendall(struct.pack("<BI", 1, 1001))
    with pytest.raises(LinkLostError, match="announced a message of 1001 bytes, the limit is 1000"):
        tapped.head.receive(WAIT_S)


def test_sending_never_blocks_and_a_peer_that_does_not_read_is_lost():
    node, head = pair(max_bytes=1 << 20)
    with pytest.raises(LinkLostError, match="does not read what it is sent"):
        for _ in range(100):
            node.send(1, bytes(1 << 20))
    assert node.unsent_bytes < 4 << 20
    with pytest.raises(LinkLostError, match="does not read"):
        node.flush()
    assert received(head)[0] == 1  # what came before is whole


def test_what_waits_is_sent_when_the_other_side_reads():
    node, head = pair(max_bytes=16 << 20)
    node.send(1, bytes(16 << 20))
    assert node.unsent_bytes > 0 and not node.flush()
    thread = threading.Thread(target=node.flush, args=(WAIT_S,), daemon=True)
    thread.start()
    assert received(head) == (1, bytes(16 << 20))
    thread.join()
    assert node.unsent_bytes == 0 and node.flush()


def test_closing_ends_both_sides_also_one_that_waits_in_another_thread():
    node, head = pair()
    reasons: list[str] = []

    def wait_for_ever(link: Link) -> None:
        try:
            link.receive(None)
        except LinkLostError as error:
            reasons.append(str(error))

    threads = [threading.Thread(target=wait_for_ever, args=(link,)) for link in (node, head)]
    for thread in threads:
        thread.start()
    node.send(1, b"")  # does not wake `head` for good: it returns with a message
    threads[1].join(WAIT_S)
    node.close("was told to end")
    threads[0].join(WAIT_S)
    assert reasons == ["node 0 (host-a, 10.0.0.1) was told to end"]
    with pytest.raises(LinkLostError, match="has hung up"):
        head.receive(WAIT_S)
    with pytest.raises(LinkLostError, match="was told to end"):
        node.send(1, b"")
    node.close()
