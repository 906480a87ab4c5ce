"""The frontend's index of prefix caches is the same for single events and for any batches of them."""

import random

import pytest

from oarlock.engine.ipc.frames import FrameError, FrameReader
from oarlock.engine.ipc.messages import Blocks, encode, read_from_engine
from oarlock.engine.kv_cache.block_events import (
    HASH_BYTES,
    AllBlocksCleared,
    BlockChanges,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    extend_hashes,
)
from oarlock.engine.replicas import PrefixIndex


def sent(changes: BlockChanges) -> BlockChanges:
    """Changes as they arrive at the frontend."""
    (payload,) = FrameReader().feed(encode(Blocks(*changes)))
    message = read_from_engine(payload)
    assert isinstance(message, Blocks)
    return message.read()


def one_by_one(index: set[bytes], events: list[BlockEvent]) -> None:
    """Apply events one by one, the slow way."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockStored):
            index.add(event.block_hash)
        else:
            index.remove(event.block_hash)


@pytest.mark.parametrize("seed", range(5))
def test_batches_come_to_the_same_as_events_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    expected: list[set[bytes]] = [set(), set()]
    index = PrefixIndex(2, 4)
    for _ in range(200):
        number, events = draw.randrange(2), list[BlockEvent]()
        there = set(expected[number])
        for _ in range(draw.randrange(8)):
            if draw.random() < 0.03:
                events.append(AllBlocksCleared())
                there.clear()
            elif there and draw.random() < 0.5:
                events.append(BlockRemoved(there.pop()))
            else:
                new = draw.randbytes(HASH_BYTES) if draw.random() < 0.9 else bytes(HASH_BYTES)
                if new not in there:
                    events.append(BlockStored(new, None, [1, 2, 3, 4], b""))
                    there.add(new)
        one_by_one(expected[number], events)
        index.apply(number, sent(BlockChanges.of(events)))
        assert [index.held(0), index.held(1)] == expected
    index.clear(0)
    assert [index.held(0), index.held(1)] == [set(), expected[1]]


def test_a_prefix_is_what_is_held_from_the_first_block_on() -> None:
    tokens, index = list(range(20)), PrefixIndex(3, 4)
    hashes = list[bytes]()
    extend_hashes(hashes, tokens, b"salt", 4, 5)
    index.apply(0, BlockChanges(False, hashes[:2], ()))
    index.apply(1, BlockChanges(False, hashes, ()))
    index.apply(2, BlockChanges(False, hashes[1:], ()))
    assert index.num_cached(tokens, b"salt") == [8, 16, 0], "the last token is always left to compute"
    assert index.num_cached([*tokens, 1], b"salt") == [8, 20, 0]
    assert index.num_cached(tokens[:3], b"salt") == index.num_cached([], b"salt") == [0, 0, 0]
    assert index.num_cached(tokens, b"") == [0, 0, 0]


@pytest.mark.parametrize("size", [0, HASH_BYTES - 1, HASH_BYTES + 1])
def test_hashes_of_another_size_are_a_bad_message(size: int) -> None:
    for changes in ([bytes(size)], []), ([], [bytes(HASH_BYTES), bytes(size)]):
        (payload,) = FrameReader().feed(encode(Blocks(False, *changes)))
        with pytest.raises(FrameError, match="length"):
            read_from_engine(payload)
