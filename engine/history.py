"""Which ids a sequence holds and how often it generated each: what penalties are computed from.

Grows by one entry per token, so a long sequence costs each step no more than a short one. Knows token ids and numpy.
Does not know what a penalty is, nor who asks.
"""

import numpy as np

_FIRST_CAPACITY = 64


class TokenHistory:
    """Distinct ids in the order they came, each with the number of times it was generated."""

    __slots__ = ("_counts", "_ids", "_num_seen", "_place_of")

    def __init__(self, prompt_token_ids: tuple[int, ...], num_prompt_tokens: int) -> None:
        """`prompt_token_ids` may be empty when those of the prompt do not matter."""
        distinct = dict.fromkeys(prompt_token_ids)
        capacity = len(distinct) + _FIRST_CAPACITY
        self._ids = np.zeros(capacity, np.int32)
        self._ids[: len(distinct)] = np.fromiter(distinct, np.int32, len(distinct))
        self._counts = np.zeros(capacity, np.int32)
        self._place_of = dict(zip(distinct, range(len(distinct)), strict=True))
        self._num_seen = num_prompt_tokens

    def catch_up(self, token_ids: list[int]) -> None:
        """`token_ids` is the whole sequence, which only ever grows; what was counted is not counted again."""
        for token in token_ids[self._num_seen :]:
            place = self._place_of.setdefault(token, len(self._place_of))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._num_seen = len(token_ids)

    @property
    def ids(self) -> np.ndarray:
        """int32 [n], a view of what later tokens change."""
        return self._ids[: len(self._place_of)]

    @property
    def counts(self) -> np.ndarray:
        """int32 [n], a view as well; 0: in the prompt only."""
        return self._counts[: len(self._place_of)]
