"""Index of the prefixes that each replica has cached: the hashes in its prefix cache, kept in the frontend.

It follows the cache events of each engine, so it is exact but for events that are on their way. Knows hashes alone.
"""

from collections.abc import Sequence

from oarlock.engine.kv_cache.events import BlockChanges
from oarlock.engine.kv_cache.hashing import extend_hashes


class PrefixIndex:
    """Hashes in the prefix caches of several replicas."""

    def __init__(self, num_replicas: int, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._block_size = block_size
        self._held: list[set[bytes]] = [set() for _ in range(num_replicas)]

    def apply(self, replica: int, changes: BlockChanges) -> None:
        """Apply the cache changes that `replica` has reported."""
        held = self._held[replica]
        if changes.is_cleared:
            held.clear()
        held.update(changes.stored)
        held.difference_update(changes.removed)

    def clear(self, replica: int) -> None:
        """Forget all blocks of `replica`, whose engine is gone."""
        self._held[replica].clear()

    def held(self, replica: int) -> frozenset[bytes]:
        """All hashes of a replica."""
        return frozenset(self._held[replica])

    def num_cached(self, token_ids: Sequence[int], cache_salt: bytes) -> list[int]:
        """For each replica, how many leading tokens of a prompt it holds: whole blocks, and never the last token.

        Hashes are computed up to the first block that none of them holds.
        """
        found = [0] * len(self._held)
        alive, hashes = [number for number, held in enumerate(self._held) if held], list[bytes]()
        for column in range((len(token_ids) - 1) // self._block_size):
            if not alive:
                break
            extend_hashes(hashes, token_ids, cache_salt, self._block_size, column + 1)
            alive = [number for number in alive if hashes[column] in self._held[number]]
            for number in alive:
                found[number] += self._block_size
        return found
