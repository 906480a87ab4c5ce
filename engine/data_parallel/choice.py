"""Chooses the replica of a request: the one with the longest cached prefix among those that are not too busy.

A pure function of counts: no clock, no randomness, no engine. Consistent hashing with bounded loads (Mirrokni et al.,
2018) has the same bound; here the cached prefix takes the place of the hash. `PrefixIndex` has the hashes in the prefix
cache of each replica, in the frontend: it follows the cache events of each engine, so it is exact but for events that
are on their way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oarlock.engine.kv_cache.events import BlockChanges, extend_hashes

# Weight of an open request beyond the tokens of its prompt that are yet to be computed: it takes a row of each step
# until it ends.
TOKENS_OF_A_REQUEST = 128
# A replica may be chosen for its prefix while it has at most this many tokens more than the least busy one, or a fourth
# more. A prefix that all prompts share is therefore computed on a second replica as soon as a few of them run at a
# time; from then on it is cached on both, and the less busy one is chosen.
SLACK_TOKENS = 512
SLACK_SHARE = 4


@dataclass(slots=True)
class Load:
    """Load of a replica, counted from the requests sent to it, without asking it."""

    num_open: int = 0  # requests that have not ended
    num_waiting_tokens: int = 0  # of prompts without an answer so far, cached tokens left out
    num_chosen: int = 0  # requests ever sent there: the tie-break, so that all replicas' memory is used
    max_open: float = math.inf  # requests that run and wait there at most
    max_waiting_tokens: float = math.inf  # prompt tokens in its queue, at most

    @property
    def weight(self) -> int:
        """Weight of the load, in tokens."""
        return TOKENS_OF_A_REQUEST * self.num_open + self.num_waiting_tokens

    @property
    def has_room(self) -> bool:
        """Whether another request would not be refused by a full queue, as far as the requests themselves say."""
        return self.num_open < self.max_open and self.num_waiting_tokens < self.max_waiting_tokens


def bound(least: int) -> int:
    """The largest weight with which a replica is still chosen, where that of the least busy one is `least`."""
    return least + max(SLACK_TOKENS, least // SLACK_SHARE)


def choose(loads: Sequence[Load | None], num_cached: Sequence[int]) -> int:
    """Choose a replica by its number. A load of None: that replica takes no requests. One without room is skipped while
    another has room.

    `num_cached`: leading tokens of the prompt that each has in its prefix cache. Equally long prefixes: the least busy
    one, and of those equally busy the one that was chosen least often, then the first. Raises `ValueError` when none
    takes requests.
    """
    there = [(number, load) for number, load in enumerate(loads) if load is not None]
    there = [(number, load) for number, load in there if load.has_room] or there
    most = bound(min(load.weight for _, load in there))
    return min(
        (-num_cached[number], load.weight, load.num_chosen, number) for number, load in there if load.weight <= most
    )[-1]


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
