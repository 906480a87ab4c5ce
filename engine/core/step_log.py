"""What the last steps took, of the engine and of each rank, and how many tokens they computed a second.

Costs a step a few microseconds. Knows counts and seconds; does not know sequences.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.stats import RankTimes, StepTimesState, TokenRates

_REMEMBERED = 512  # steps
_MARK_S = 1.0  # between two readings of the token counters
_WINDOW_S = 10.0  # over which tokens a second are counted


class StepLog:
    """The last steps, in the order of their answers. Times are in seconds; `now` is the engine's clock."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = np.zeros(_REMEMBERED)
        self._rank_ns = np.zeros((_REMEMBERED, 0), np.int64)
        self._num_prompt_tokens = 0  # computed, ever
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, prompt tokens, generated tokens)

    def observe(
        self,
        begun_s: float,
        seconds: float,
        num_prompt_tokens: int,
        num_generated_before: int,
        rank_ns: Sequence[int],
    ) -> None:
        """A step that began at `begun_s` took so long. `num_generated_before`: tokens sampled before it, ever.
        `rank_ns`: of the newest step that each rank has ended."""
        if not self._marks or begun_s - self._marks[-1][0] >= _MARK_S:
            self._marks.append((begun_s, self._num_prompt_tokens, num_generated_before))
            while self._marks[0][0] < begun_s - _WINDOW_S - _MARK_S:
                self._marks.popleft()
        place = self._count % _REMEMBERED
        if len(rank_ns) != self._rank_ns.shape[1]:
            self._rank_ns = np.zeros((_REMEMBERED, len(rank_ns)), np.int64)
        self._rank_ns[place] = rank_ns
        self._seconds[place] = seconds
        self._num_prompt_tokens += num_prompt_tokens
        self._count += 1

    def times(self) -> StepTimesState:
        """Of the last 512 steps."""
        seconds = self._seconds[: min(self._count, _REMEMBERED)]
        if not len(seconds):
            return StepTimesState(count=0, last_ms=0.0, median_ms=0.0, p99_ms=0.0, ranks=[])
        last = (self._count - 1) % _REMEMBERED
        median, p99 = np.percentile(seconds, (50, 99)).tolist()
        ranks = self._rank_ns[: len(seconds)]
        medians = np.median(ranks, axis=0).tolist()
        return StepTimesState(
            count=self._count,
            last_ms=_ms(float(seconds[last])),
            median_ms=_ms(median),
            p99_ms=_ms(p99),
            ranks=[
                RankTimes(rank=rank, last_ms=_ms(ns / 1e9), median_ms=_ms(medians[rank] / 1e9))
                for rank, ns in enumerate(ranks[last].tolist())
            ],
        )

    def token_rates(self, now: float, num_generated: int) -> TokenRates:
        """Tokens a second over the last ten seconds, or since the first step after a pause. `num_generated`: ever."""
        mark = next((one for one in self._marks if one[0] >= now - _WINDOW_S), None)
        if mark is None:
            return TokenRates(prompt=0.0, generation=0.0)
        seconds = max(_MARK_S, now - mark[0])
        prompt, generated = self._num_prompt_tokens - mark[1], num_generated - mark[2]
        return TokenRates(prompt=round(prompt / seconds, 1), generation=round(generated / seconds, 1))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
