"""Chooses the replica of a request: the one with the longest cached prefix among those that are not too busy.

A pure function of counts: no clock, no randomness, no engine. Consistent hashing with bounded loads (Mirrokni et al.,
2018) has the same bound; here the cached prefix takes the place of the hash.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
