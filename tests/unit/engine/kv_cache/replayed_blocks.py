"""Consumer of the prefix cache's events: replays them, and checks each."""

from collections.abc import Iterable

from oarlock.engine.kv_cache.block_events import AllBlocksCleared, BlockEvent, BlockStored, extend_hashes
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory


class ReplayedBlocks:
    """Blocks that can be found, by the events alone. `stored` keeps each block's parent, tokens and salt."""

    def __init__(self, block_size: int) -> None:
        self.stored: dict[bytes, BlockStored] = {}
        self.num_stored = self.num_removed = self.num_cleared = 0
        self._block_size = block_size

    def replay(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.stored.clear()
                self.num_cleared += 1
            elif isinstance(event, BlockStored):
                assert event.block_hash not in self.stored, "stored twice"
                hashes = [] if event.parent_hash is None else [event.parent_hash]
                before = [0] * self._block_size * len(hashes)
                extend_hashes(hashes, [*before, *event.token_ids], event.cache_salt, self._block_size, len(hashes) + 1)
                assert hashes[-1] == event.block_hash, "its parent, tokens and salt are those of another block"
                self.stored[event.block_hash] = event
                self.num_stored += 1
            else:
                assert self.stored.pop(event.block_hash, None), "removed, but not stored"
                self.num_removed += 1

    def check(self, memory: SequenceMemory) -> None:
        """Check that the leading group has exactly these blocks."""
        assert self.stored.keys() == memory.leader.pool.block_of_hash.keys()
