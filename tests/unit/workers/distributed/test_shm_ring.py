"""The ring: every reader receives the messages in order, and each side notices when the other has ended."""

import os
import threading

import pytest

from oarlock.workers.distributed import shm_ring as ring
from oarlock.workers.distributed.shm_layout import fence
from oarlock.workers.distributed.shm_ring import (
    ChannelClosedError,
    RingLayout,
    RingReader,
    RingWriter,
    anonymous_memory,
)


def make(num_readers: int = 1) -> tuple[RingWriter, list[RingReader]]:
    layout = RingLayout.holding(100, num_readers)
    memory = anonymous_memory(layout.total_bytes)
    pipes = [os.pipe() for _ in range(num_readers)]
    writer = RingWriter(memory, [write for _, write in pipes], layout)
    readers = [RingReader(memory, read, index, layout) for index, (read, _) in enumerate(pipes)]
    os.close(memory)
    return writer, readers


def test_every_reader_gets_every_message_in_order() -> None:
    writer, readers = make(3)
    received: list[list[bytes]] = [[], [], []]

    def read(index: int) -> None:
        for _ in range(1000):
            with readers[index].recv() as slot:
                received[index].append(bytes(slot[:4]))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1000):
        writer.wait_for_room(60)
        with writer.send() as slot:
            slot[:4] = number.to_bytes(4, "little")
    for thread in threads:
        thread.join()
    expected = [number.to_bytes(4, "little") for number in range(1000)]
    assert received == [expected] * 3


def test_a_fence_separates_slot_and_counter_if_stores_may_be_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, (reader,) = make()
    fences: list[tuple[bytes, int]] = []  # what the slot and the counter held at each

    def seen() -> None:
        fence()
        fences.append((bytes(writer._slots[1][:1]), writer.finished(0)))

    monkeypatch.setattr(ring, "STORES_KEEP_ORDER", False)
    monkeypatch.setattr(ring, "fence", seen)
    with writer.send() as slot:
        slot[0] = 9
    assert fences == [(b"\0", 0)]  # the counter was read before the slot is written
    with reader.recv(timeout_s=60) as slot:
        assert slot[0] == 9
    assert fences[1:] == [(b"\x09", 0)]  # the slot was read before the counter is written
    assert writer.finished(0) == 1


def test_a_slow_reader_is_not_overrun() -> None:
    writer, _ = make()
    for _ in range(4):
        with writer.send() as slot:
            slot[0] = 1
    with pytest.raises(RuntimeError, match="reader 0 has not finished message 1"), writer.send():
        pass


def test_a_writer_waits_for_room_and_no_longer_than_for_a_reader_that_lives() -> None:
    writer, (reader,) = make()
    for _ in range(4):
        writer.wait_for_room(0)
        with writer.send():
            pass
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        writer.wait_for_room(0.01)
    with reader.recv() as slot:
        slot.release()
        with pytest.raises(TimeoutError):  # it still holds the slot
            writer.wait_for_room(0.01)
    writer.wait_for_room(0)
    with writer.send():
        pass
    reader.close()
    with pytest.raises(ChannelClosedError):
        writer.wait_for_room(60)


def test_a_reader_notices_that_the_writer_has_ended() -> None:
    writer, (reader,) = make()
    writer.close()
    with pytest.raises(ChannelClosedError), reader.recv():
        pass


def test_a_writer_notices_that_a_reader_has_ended() -> None:
    writer, (reader,) = make()
    reader.close()
    with pytest.raises(ChannelClosedError), writer.send():
        pass


def test_waiting_ends_after_the_timeout() -> None:
    _writer, (reader,) = make()
    with pytest.raises(TimeoutError), reader.recv(timeout_s=0.01):
        pass


def test_a_message_in_two_parts_is_one_message() -> None:
    writer, (reader,) = make()
    for number in range(10):
        with writer.send(rest_follows=True) as slot:
            slot[0] = number
        with reader.recv(timeout_s=60) as slot:
            assert slot[0] == number
            with pytest.raises(TimeoutError):
                reader.wait_for_rest(timeout_s=0.001)
            with writer.send_rest() as rest:
                rest[1] = number + 100
            reader.wait_for_rest(timeout_s=60)
            reader.wait_for_rest(timeout_s=0)  # it is here
            assert slot[1] == number + 100
        with writer.send() as slot:
            slot[0] = 255
        with reader.recv(timeout_s=60) as slot:
            reader.wait_for_rest(timeout_s=0)  # it was whole from the start
            assert slot[0] == 255


def test_a_rest_that_is_not_waited_for_is_not_taken_for_a_message() -> None:
    writer, (reader,) = make()
    with writer.send(rest_follows=True) as slot:
        slot[0] = 1
    with reader.recv(timeout_s=60) as slot:
        assert slot[0] == 1
    with writer.send_rest() as slot:
        slot[1] = 7
    with pytest.raises(TimeoutError), reader.recv(timeout_s=0.001):
        pass
    with writer.send() as slot:
        slot[0] = 2
    with reader.recv(timeout_s=60) as slot:
        assert slot[0] == 2


def test_no_message_is_sent_before_the_rest_of_the_last_one() -> None:
    writer, _readers = make()
    with writer.send() as slot:
        slot[0] = 1
    with pytest.raises(AssertionError, match="is complete"), writer.send_rest():
        pass
    with writer.send(rest_follows=True) as slot:
        slot[0] = 2
    with pytest.raises(AssertionError, match="the rest"), writer.send():
        pass


def test_waiting_for_a_rest_ends_when_the_writer_has_ended() -> None:
    writer, (reader,) = make()
    with writer.send(rest_follows=True) as slot:
        slot[0] = 1
    with reader.recv(timeout_s=60):
        writer.close()
        with pytest.raises(ChannelClosedError):
            reader.wait_for_rest()


def test_closing_gives_every_descriptor_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        writer, readers = make(2)
        writer.close()
        for reader in readers:
            reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
