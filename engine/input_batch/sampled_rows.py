"""References of a step to tokens that the step before it samples, and that are not known when it is built.

Knows rows of the engine's tables and of logits. Does not know sequences.
"""

import numpy as np

_NONE = -1


class SampledRows:
    """Maps rows of the engine's tables to the rows of logits that sampled for them, for the last two steps."""

    def __init__(self, max_num_seqs: int) -> None:
        self._index_of = np.full((2, max_num_seqs), _NONE, np.int32)
        self._step_ids = [0, 0]

    def note(self, step_id: int, rows: np.ndarray, samples: np.ndarray) -> None:
        """`rows`, int64 [L]: the table row of each row of logits; `samples`, bool [L]: whether a token is sampled."""
        index_of = self._index_of[step_id % 2]
        index_of[:] = _NONE
        indices = np.flatnonzero(samples)
        index_of[rows[indices]] = indices
        self._step_ids[step_id % 2] = step_id

    def references(self, step_id: int, rows: np.ndarray) -> np.ndarray:
        """References for the `token_ids` of step `step_id` to the tokens that the step before samples for `rows`."""
        before = step_id - 1
        assert self._step_ids[before % 2] == before, "the step before was not built"
        indices = self._index_of[before % 2, rows]
        assert (indices != _NONE).all(), "the step before samples no token for a sequence whose newest is unknown"
        return -1 - indices
