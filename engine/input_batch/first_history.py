"""First history of a sequence in its row: its distinct ids and how often each was generated.

Ranks keep the history from there on, and count the tokens that they sample. The distinct ids of a prompt are computed
once for all choices that share it. Does not know penalties.
"""

import numpy as np

from oarlock.engine.input_batch.identity_cache import IdentityCache
from oarlock.engine.scheduler.sequence import Sequence

_NO_IDS = np.empty(0, np.int32)


class _PromptIds:
    """The distinct ids of one prompt, in order: int32 [p]."""

    def __init__(self, prompt_token_ids: tuple[int, ...]) -> None:
        self.made_from = prompt_token_ids
        ids = np.sort(np.array(prompt_token_ids, np.int32))
        self.ids = ids[np.diff(ids, prepend=-1) > 0]


_prompts = IdentityCache(_PromptIds)


class FirstHistory:
    """Distinct ids of one sequence's prompt, if penalties count them, and the history made from them."""

    def __init__(self, seq: Sequence) -> None:
        request = seq.request
        counts = request.params.repetition_penalty != 1  # the other penalties are of generated ids alone
        self._prompt = _prompts.get(request.prompt_token_ids) if counts else None

    def of(self, seq: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """Distinct ids in order, and how often each was generated, 0 for those of the prompt only: int32 [n] each."""
        prompt = _NO_IDS if self._prompt is None else self._prompt.ids
        if len(seq.token_ids) == seq.num_prompt_tokens:
            return prompt, np.zeros_like(prompt)
        generated = np.array(seq.token_ids[seq.num_prompt_tokens :], np.int32)
        ids, times = np.unique(generated, return_counts=True)
        every = np.union1d(prompt, ids)
        counts = np.zeros_like(every)
        counts[np.searchsorted(every, ids)] = times
        return every, counts
