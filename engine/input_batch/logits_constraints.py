"""The constraints of one request on its logits: bans, additions and masks over the vocabulary.

    bias     additions of `logit_bias`; -inf for its -100, for ids that complete a bad word, for stop ids too early
    mask     `allowed_token_ids`, narrowed by the grammar, narrowed to the ids that `logit_bias` forces with 100

Forced ids exclude all others, but bans exclude forced ids: where every forced id is banned or outside the mask, nothing
is forced. Does not know rows, steps, or how the ranks apply the constraints.
"""

import numpy as np

from engine.input_batch.bad_words import BadWords
from engine.input_batch.identity_cache import IdentityCache
from engine.sampling_params import BAN, FORCE, banned_always
from engine.scheduler.sequence import Sequence
from workers.protocol import mask_words

_ALL = 0xFFFFFFFF


class _AllowedIds:
    """The mask of `allowed_token_ids`: uint32, as many words as the largest of them needs."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.made_from = ids
        self._bits = _bits(ids, max(ids) + 1)

    def narrow(self, mask: np.ndarray) -> None:
        size = len(self._bits)
        mask[:size] &= self._bits
        mask[size:] = 0


_bad_words = IdentityCache(BadWords)
_allowed_ids = IdentityCache(_AllowedIds)


class Constraints:
    """The constraints of one sequence."""

    __slots__ = (
        "_allowed",
        "_bad_words",
        "_bans",
        "_forced",
        "_forced_ids",
        "_ids",
        "_min_tokens",
        "_stop_ids",
        "_values",
    )

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        params = seq.request.params
        self._bans = banned_always(params)
        added = {token: value for token, value in params.logit_bias if BAN < value < FORCE}
        self._ids = np.array([*added, *self._bans], np.int32)
        self._values = np.array([*added.values(), *[-np.inf] * len(self._bans)], np.float32)
        self._forced_ids = [token for token, value in params.logit_bias if value >= FORCE]
        self._forced = _bits(self._forced_ids, vocab_size) if self._forced_ids else None
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _allowed_ids.get(allowed)
        self._min_tokens = params.min_tokens
        self._stop_ids = sorted(seq.stop_ids)
        self._bad_words = _bad_words.get(params.bad_words) if params.bad_words else None

    def bans_now(self, seq: Sequence, num_generated: int) -> list[int]:
        """Ids that are banned in this step in addition to those that always are, after `num_generated` tokens.

        The last of these may be unknown as yet; not where bad words have several tokens.
        """
        ids = self._stop_ids if num_generated < self._min_tokens else []
        if self._bad_words is not None and num_generated:
            ids = ids + self._bad_words.completed_by(seq.token_ids, num_generated)
        return ids

    def bias(self, bans_now: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int32 [m], and what is added to their logits, float32 [m]. An id may come twice."""
        if not bans_now:
            return self._ids, self._values
        values = np.full(len(bans_now), -np.inf, np.float32)
        return np.concatenate([self._ids, np.array(bans_now, np.int32)]), np.concatenate([self._values, values])

    def has_mask(self, seq: Sequence) -> bool:
        return self._allowed is not None or self._forced is not None or seq.grammar_matcher is not None

    def fill_mask(self, seq: Sequence, bans_now: list[int], into: np.ndarray) -> None:
        """Write the ids that may be chosen as bits of `into`, uint32 [ceil(vocab / 32)]."""
        if seq.grammar_matcher is not None:
            seq.grammar_matcher.fill_mask(into)
        else:
            into[:] = _ALL
        if self._allowed is not None:
            self._allowed.narrow(into)
        if self._forced is not None:
            forced = into & self._forced
            for token in {*self._bans, *bans_now}.intersection(self._forced_ids):
                forced[token // 32] &= np.uint32(_ALL ^ 1 << token % 32)
            if forced.any():
                into[:] = forced


def _bits(ids: tuple[int, ...] | list[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: bit v % 32 of word v // 32 is set for each v of `ids`."""
    flags = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    flags[np.array(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")
