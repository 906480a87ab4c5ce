"""Fast-forwards many steps at once where each would give every running sequence one token, and do nothing else.

The scheduler is the real one, and gives a sequence several tokens in one step as drafts that are all right. A leap ends
when the first sequence ends, and is cut short when a request arrives: later drafts are then wrong. Its steps take as
long as one by one, and a test compares both. Only blocks differ: they are allocated for the whole leap at its
beginning, and where they are short, steps are taken one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.simulation.fleet.requests import TOKEN
from oarlock.engine.simulation.roofline import StepLoad, StepTime
from oarlock.engine.spec_decode.drafter import Candidate, Drafter, RowCosts

_NO_LOOKUP = SpeculativeConfig(num_speculative_tokens=1, prompt_lookup_max=1, prompt_lookup_min=1)


class Leap(Drafter):
    """Replaces the scheduler's drafter. Drafts only while `is_allowed`, which callers set when nothing waits."""

    def __init__(self, time: StepTime, manager: KVCacheManager, costs: RowCosts) -> None:
        super().__init__(_NO_LOOKUP, costs)
        self._time, self._manager = time, manager
        self.is_allowed = False
        self.steps_s = np.zeros(0)  # float64 [steps]   seconds of those that `choose` has drafted for

    def may_pay(self, num_seqs: int) -> bool:
        return self.is_allowed

    def choose(self, candidates: Sequence[Candidate], num_seqs: int, most: int) -> list[list[int]]:
        """Draft the same number of tokens for each candidate."""
        count = 0
        if len(candidates) == num_seqs:
            count = min(most // num_seqs, min(candidate.room for candidate in candidates))
        lengths = [len(candidate.token_ids) for candidate in candidates]
        if count and not self._has_blocks(lengths, count):
            count = 0
        contexts = sum(lengths) + num_seqs * np.arange(count + 1)
        self.steps_s = self._time.seconds(StepLoad(num_seqs, num_seqs, contexts, contexts))
        return [[TOKEN] * count for _ in candidates]

    def _has_blocks(self, lengths: list[int], count: int) -> bool:
        """Whether there are blocks for `count` more tokens of each of these sequences, and half of them stay free."""
        of, available = self._manager.blocks_for, self._manager.num_available
        needed = sum(of(length + count) - of(length - 1) for length in lengths)
        return needed + len(lengths) <= available // 2
