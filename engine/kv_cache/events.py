"""Events of the prefix cache, and the log into which the block pool writes them.

A block is stored once its computation is scheduled; blocks that a withdrawn or refused step was to fill are removed.
At any time the events so far, replayed in order, give exactly the hashes by which a new request could find a block.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


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
