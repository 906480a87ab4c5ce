"""Which ids a sequence holds and how often it generated each: what penalties are computed from.

Grows by one entry per token, so a long sequence costs each step no more than a short one. The distinct ids of a prompt
are found once, however many choices share it. Knows token ids and numpy. Does not know what a penalty is, nor who asks.
"""

import numpy as np

from engine.input_batch.identity_cache import IdentityCache

_FIRST_CAPACITY = 64


class _PromptIds:
    """The distinct ids of one prompt, in order: int32 [p]."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self.made_from = prompt_token_ids
        ids = np.sort(np.array(prompt_token_ids, np.int32))
        self.ids = ids[np.diff(ids, prepend=-1) > 0]


_prompts = IdentityCache(_PromptIds)


class TokenHistory:
    """Distinct ids, those of the prompt first, each with the number of times it was generated."""

    __slots__ = ("_counts", "_ids", "_num_ids", "_num_seen", "_place_of", "_prompt")

    def __init__(self, prompt_token_ids: tuple[int, ...], num_prompt_tokens: int) -> None:
        """`prompt_token_ids` may be empty when those of the prompt do not matter."""
        self._prompt = _prompts.get(prompt_token_ids)
        self._num_ids = len(self._prompt.ids)
        self._ids = np.concatenate([self._prompt.ids, np.zeros(_FIRST_CAPACITY, np.int32)])
        self._counts = np.zeros_like(self._ids)
        self._place_of: dict[int, int] = {}  # of the ids that were generated
        self._num_seen = num_prompt_tokens

    def catch_up(self, token_ids: list[int]) -> None:
        """`token_ids` is the whole sequence, which only ever grows; what was counted is not counted again."""
        for token in token_ids[self._num_seen :]:
            place = self._place_of.get(token)
            if place is None:
                place = self._place_of[token] = self._place(token)
            self._counts[place] += 1
        self._num_seen = len(token_ids)

    def _place(self, token: int) -> int:
        """Where an id stands that was not generated before."""
        known = self._prompt.ids
        place = int(np.searchsorted(known, token))
        if place < len(known) and known[place] == token:
            return place
        place = self._num_ids
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._num_ids += 1
        return place

    @property
    def ids(self) -> np.ndarray:
        """int32 [n], a view of what later tokens change."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> np.ndarray:
        """int32 [n], a view as well; 0: in the prompt only."""
        return self._counts[: self._num_ids]
