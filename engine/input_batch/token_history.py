"""The distinct ids of a sequence and how often each was generated, from which ranks compute penalties.

Updated by each new token, so that a long sequence costs a step no more than a short one. The distinct ids of a prompt
are computed once for all choices that share it. Does not know penalties.
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

    __slots__ = ("_counts", "_ids", "_index_of", "_num_ids", "_num_seen", "_prompt")

    def __init__(self, prompt_token_ids: tuple[int, ...], num_prompt_tokens: int) -> None:
        """`prompt_token_ids` may be empty where the ids of the prompt do not count."""
        self._prompt = _prompts.get(prompt_token_ids)
        self._num_ids = len(self._prompt.ids)
        self._ids = np.concatenate([self._prompt.ids, np.zeros(_FIRST_CAPACITY, np.int32)])
        self._counts = np.zeros_like(self._ids)
        self._index_of: dict[int, int] = {}  # of the ids that were generated
        self._num_seen = num_prompt_tokens

    def catch_up(self, token_ids: list[int]) -> None:
        """Count the tokens that are new since the last call. `token_ids` is the whole sequence, which only grows."""
        for token in token_ids[self._num_seen :]:
            index = self._index_of.get(token)
            if index is None:
                index = self._index_of[token] = self._add(token)
            self._counts[index] += 1
        self._num_seen = len(token_ids)

    def _add(self, token: int) -> int:
        """The index of an id that was not generated before."""
        known = self._prompt.ids
        index = int(np.searchsorted(known, token))
        if index < len(known) and known[index] == token:
            return index
        index = self._num_ids
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._num_ids += 1
        return index

    @property
    def ids(self) -> np.ndarray:
        """int32 [n], a view; later tokens change it."""
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> np.ndarray:
        """int32 [n], a view; how often each id was generated, 0 for those of the prompt only."""
        return self._counts[: self._num_ids]
