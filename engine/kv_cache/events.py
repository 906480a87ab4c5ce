"""Names of full blocks outside the pool, and the events of the prefix cache that tell of them.

The hash of a block is chained over the salt and every token up to the block's end: equal hashes mean equal content, and
from the tokens and salt of a prompt anyone can compute the hashes of its blocks.

A block is stored once its computation is scheduled; blocks that a withdrawn or refused step was to fill are removed.
At any time the events so far, replayed in order, give exactly the hashes by which a new request could find a block.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

HASH_BYTES = 32


class BlockStored(NamedTuple):
    """A full block can be found by its hash. It could not be found before."""

    block_hash: bytes
    parent_hash: bytes | None  # of the block before it in the sequence, which may have left the cache; None: the first
    token_ids: Sequence[int]  # exactly one block of them
    cache_salt: bytes


class BlockRemoved(NamedTuple):
    """The block that was found by this hash cannot be found any more."""

    block_hash: bytes


class AllBlocksCleared(NamedTuple):
    """No block can be found any more."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEventLog:
    """Events in the order of the steps, kept until they are taken."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def append(self, event: BlockEvent) -> None:
        self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """Take the events since the last call."""
        events, self._events = self._events, []
        return events


class BlockChanges(NamedTuple):
    """Net change that a run of events makes. `is_cleared` applies first; no hash is in both lists."""

    is_cleared: bool
    stored: Sequence[bytes]
    removed: Sequence[bytes]

    @staticmethod
    def of(events: Iterable[BlockEvent]) -> "BlockChanges":
        is_cleared, is_there = False, dict[bytes, bool]()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                is_cleared, is_there = True, {}
            else:
                is_there[event.block_hash] = isinstance(event, BlockStored)
        stored = [block_hash for block_hash, there in is_there.items() if there]
        return BlockChanges(is_cleared, stored, [block_hash for block_hash, there in is_there.items() if not there])


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], cache_salt: bytes, block_size: int, num_blocks: int
) -> None:
    """Extend `hashes`, which has those of the first blocks of `token_ids`, to `num_blocks`. All must be full.

    blake2b(hash of the block before, its token ids as int32); before the first block stands the hash of the salt.
    """
    while len(hashes) < num_blocks:
        parent = hashes[-1] if hashes else blake2b(cache_salt, digest_size=HASH_BYTES).digest()
        start = len(hashes) * block_size
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())
