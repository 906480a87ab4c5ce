"""Constraints of one request on its logits: bans, additions and masks over the vocabulary.

    bias     additions of `logit_bias`; -inf for its -100, for bad words of one token, for stop ids too early
    mask     the grammar, narrowed to `allowed_token_ids`, to the ids that `logit_bias` forces with 100, and to those
             that complete no bad word of several tokens

Constraints that depend on the newest token are in the mask; the bias is known before that token is.

Forced ids exclude all others, but bans exclude forced ids: where every forced id is banned or outside the mask, nothing
is forced. Does not know rows, steps, or how the ranks apply the constraints.

Ids that would complete a bad word are found at a cost that does not depend on the number of words: they form a tree by
their tokens in reverse order, without the last one, which is the id to ban. Each step walks it from the newest token
back while some word matches, at most as far as the longest word. A node is split when it is first reached, so words
whose beginnings are never generated cost nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from itertools import chain
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from oarlock.engine.sampling_params import BAN, FORCE, banned_always
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.workers.protocol import mask_words

Word = tuple[int, ...]
_Split = tuple[dict[int, "_Node"], list[int]]  # children by the token before; last ids of the words that end here
_Node = list[Word] | _Split  # until it is first reached, the words below it
Ids = tuple  # of ints, or of tuples of ints


class BadWords:
    """Tree of the bad words of one request; its choices share it."""

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.made_from = words
        self._root: dict[int, _Node] = _split([word for word in words if len(word) > 1], 0)[0]

    def completed_by(self, token_ids: Tokens[int], most: int, more: Tokens[int] = ()) -> list[int]:
        """The last ids of the words whose other tokens are the end of `token_ids` and `more`, one after the other,
        within `more` and the last `most` of `token_ids`."""
        found: list[int] = []
        children, most = self._root, most + len(more)
        for depth, token in enumerate(chain(reversed(more), reversed(token_ids)), 1):
            node = children.get(token) if depth <= most else None
            if node is None:
                break
            if isinstance(node, list):
                node = children[token] = _split(node, depth)
            children, ends = node
            found += ends
        return found


def _split(words: list[Word], depth: int) -> _Split:
    """Make a node for `words`, whose `depth` ids before the last are those on the path to it."""
    deeper: defaultdict[int, list[Word]] = defaultdict(list)
    ends = []
    length, before = depth + 1, -2 - depth
    for word in words:
        if len(word) == length:
            ends.append(word[-1])
        else:
            deeper[word[before]].append(word)
    return {**deeper}, ends


class MadeFrom(Protocol):
    """A value that keeps its key alive: while it lives, no other object can have the same identity."""

    made_from: Ids


V = TypeVar("V", bound=MadeFrom)


class IdentityCache(Generic[V]):
    """Values computed from a long tuple, for all sequences that hold the same object: the choices of a request.

    `messages.RequestReader` gives them the same object. Hashing or comparing a tuple as long as a context would cost as
    much as is saved. A value is dropped with the last sequence that holds it.
    """

    def __init__(self, make: Callable[[Ids], V]) -> None:
        self._make = make
        self._values: WeakValueDictionary[int, V] = WeakValueDictionary()

    def get(self, key: Ids) -> V:
        value = self._values.get(id(key))
        if value is None:
            value = self._values[id(key)] = self._make(key)
        return value


class _AllowedIds:
    """The mask of `allowed_token_ids`: uint32, as many words as the largest of them needs."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.made_from = ids
        self._bits = _bits(ids, max(ids) + 1)

    def narrow(self, masks: np.ndarray) -> None:
        size = len(self._bits)
        masks[:, :size] &= self._bits
        masks[:, size:] = 0


_bad_words = IdentityCache(BadWords)
_allowed_ids = IdentityCache(_AllowedIds)


class Constraints:
    """Constraints of one sequence on its logits."""

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
        "follows_tokens",
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
        has_long_words = any(len(word) > 1 for word in params.bad_words)
        self._bad_words = _bad_words.get(params.bad_words) if has_long_words else None
        self.follows_tokens = has_long_words or seq.grammar_matcher is not None  # whether the mask depends on tokens

    def bans_now(self, num_generated: int) -> list[int]:
        """Ids that the bias bans after `num_generated` tokens, in addition to those that it always bans."""
        return self._stop_ids if num_generated < self._min_tokens else []

    def bias(self, bans_now: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int32 [m], and what is added to their logits, float32 [m]. An id may come twice."""
        if not bans_now:
            return self._ids, self._values
        values = np.full(len(bans_now), -np.inf, np.float32)
        return np.concatenate([self._ids, np.array(bans_now, np.int32)]), np.concatenate([self._values, values])

    @property
    def has_mask(self) -> bool:
        return self._allowed is not None or self._forced is not None or self.follows_tokens

    def narrow(
        self,
        token_ids: list[int],
        num_generated: int,
        drafts: tuple[int, ...],
        bans: list[list[int]],
        masks: np.ndarray,
    ) -> None:
        """Narrow `masks`, uint32 [1 + drafts, W], which hold the grammar's or all ids.

        The last `num_generated` of `token_ids` were generated; row j stands after them and `drafts[:j]`. `bans`: the
        result of `bans_now` by row.
        """
        if self._allowed is not None:
            self._allowed.narrow(masks)
        if self._forced is None and self._bad_words is None:
            return
        for row, mask in enumerate(masks):
            completed: list[int] = []
            if self._bad_words is not None:
                completed = self._bad_words.completed_by(token_ids, num_generated, drafts[:row])
            if self._forced is not None:
                forced = mask & self._forced
                _remove(forced, {*self._bans, *bans[row], *completed}.intersection(self._forced_ids))
                if forced.any():
                    mask[:] = forced
            _remove(mask, completed)


def _remove(mask: np.ndarray, ids: Collection[int]) -> None:
    if ids:
        tokens = np.array([*ids], np.uint32)
        np.bitwise_and.at(mask, tokens // 32, ~(np.uint32(1) << tokens % 32))


def _bits(ids: tuple[int, ...] | list[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)]: bit v % 32 of word v // 32 is set for each v of `ids`."""
    flags = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    flags[np.array(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")
