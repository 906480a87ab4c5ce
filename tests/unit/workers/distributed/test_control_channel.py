"""Messages between a parent and a rank arrive whole and in order, and descriptors come with them."""

import os
from collections.abc import Iterator

import pytest

from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import ChannelClosedError


@pytest.fixture
def pair() -> Iterator[tuple[Control, Control]]:
    ours, theirs = Control.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order(pair: tuple[Control, Control]) -> None:
    ours, theirs = pair
    for number in range(3):
        ours.send("progress", fraction=number, name="x" * 1000)
    assert [theirs.recv()["fraction"] for _ in range(2)] == [0, 1]
    assert theirs.has_pending
    assert theirs.recv() == {"kind": "progress", "fraction": 2, "name": "x" * 1000}


def test_descriptors_arrive_as_others_for_the_same_files(pair: tuple[Control, Control]) -> None:
    ours, theirs = pair
    pipes = [os.pipe() for _ in range(3)]
    write, second, third = (pipe[1] for pipe in pipes)
    ours.send("first", a_fd=write, deep={"b_fd": second, "no_fd": None, "number": 7})
    ours.send("plain", number=1)
    ours.send("second", c_fd=third)
    for fd in (write, second, third):
        os.close(fd)  # what arrives does not need them
    first, plain, last = theirs.recv(), theirs.recv(), theirs.recv()
    assert first["deep"]["no_fd"] is None and first["deep"]["number"] == 7 and plain == {"kind": "plain", "number": 1}
    for received, (other, _) in zip((first["a_fd"], first["deep"]["b_fd"], last["c_fd"]), pipes, strict=True):
        os.write(received, b"hello")
        assert os.read(other, 9) == b"hello"
        os.close(received)
        assert os.read(other, 9) == b"", "another copy of the descriptor is open"
        os.close(other)


def test_an_end_that_is_closed_is_noticed_on_both_sides(pair: tuple[Control, Control]) -> None:
    ours, theirs = pair
    ours.send("last")
    ours.close()
    assert theirs.recv() == {"kind": "last"}
    with pytest.raises(ChannelClosedError):
        theirs.recv()
    with pytest.raises(ChannelClosedError):
        theirs.send("phase", name="loading")
