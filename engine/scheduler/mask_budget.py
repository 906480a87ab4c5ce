"""Choice of sequences with slow grammar masks that decode in a step, so that the others need not wait for the masks.

Masks are computed while the ranks run the step, and the step waits for the last mask. The masks of one step may take as
long as the ranks take without them. Sequences with slow masks therefore take turns and skip the steps between.

Pure: knows rows and seconds. Does not know grammars, blocks or other scheduled tokens.
"""

import numpy as np

from oarlock.engine.scheduler.decode_state import DecodeState

MIN_S = 0.01  # minimum time for the masks of a step, however short the step is
GRAMMARS_ONLY_S = 0.05  # time for the masks of a step without any other sequences
_MAX_SAVED_S = 0.02  # maximum time saved up over steps without slow masks
_WEIGHT = 0.1  # weight of the newest step in the mean


class MaskBudget:
    """Time for slow masks. Each step adds to it, and each slow mask is taken from it, which may overdraw it."""

    def __init__(self) -> None:
        self._step_s = 0.0  # mean time of a step
        self._mask_s = 0.0  # mean time to compute the masks of a step
        self._left_s = 0.0

    def observe(self, seconds: float, mask_s: float) -> None:
        """Learn from a step of `seconds`, in which computing masks took `mask_s`."""
        self._step_s += _WEIGHT * (seconds - self._step_s)
        self._mask_s += _WEIGHT * (mask_s - self._mask_s)

    def choose(self, state: DecodeState, rows: np.ndarray, *, any_waiting: bool) -> np.ndarray:
        """Return `rows`, int64 [R], without sequences whose slow masks exceed the time.

        Sequences that have waited longest come first, and at least one of `rows` remains.
        """
        is_slow = (state.mask_s[rows] > 0) & (state.num_tokens[rows] <= state.num_computed[rows] + 1)
        slow = is_slow.nonzero()[0]
        if not len(slow):
            return rows
        grammars_only = len(slow) == len(rows) and not any_waiting
        more_s = max(MIN_S, self._step_s - self._mask_s)
        self._left_s = min(max(_MAX_SAVED_S, more_s), self._left_s + more_s)
        left_s = GRAMMARS_ONLY_S if grammars_only else self._left_s
        # A sequence whose token is being sampled comes after the others: its last token seems older than it is.
        is_sampled = state.num_tokens[rows[slow]] <= state.num_computed[rows[slow]]
        since_s = np.nan_to_num(state.last_token_s[rows[slow]], nan=-np.inf)  # no token yet: it is first
        in_turn = slow[np.lexsort((since_s, is_sampled))]
        expected_s = state.mask_s[rows[in_turn]]
        before_s = np.cumsum(expected_s) - expected_s
        chosen = in_turn[before_s < left_s]
        if not len(chosen) and len(slow) == len(rows):
            chosen = in_turn[:1]
        self._left_s -= 0.0 if grammars_only else float(state.mask_s[rows[chosen]].sum())
        is_kept = ~is_slow
        is_kept[chosen] = True
        return rows[is_kept]
