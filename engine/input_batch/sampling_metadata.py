"""Sections of a step that only some requests need: bias, penalties and masks of the rows that sample.

    bias     added to logits: values of `logit_bias`; -inf for its -100, for bad words of one token, and for stop ids
             before `min_tokens`
    mask     the ids that the grammar allows, restricted to `allowed_token_ids`, to the ids that `logit_bias` forces
             with 100, and to the ids that complete no bad word of several tokens

All constraints that depend on the newest token are in the mask (`GrammarBitmask`), since that token may be unknown when
the step is built; the bias is known earlier. Forced ids exclude all others, but bans exclude forced ids: if every
forced id is banned or outside the mask, nothing is forced.

Penalties need the history of a sequence: its distinct ids and how often each was generated. It is sent once for each
use of a row. The ranks keep it from then on, and count the tokens that they sample. Knows numpy and the step's layout.
Does not know which row of the engine's tables belongs to which sequence, or how masks reach the ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from oarlock.engine.scheduler.sequence import GrammarMatcherProtocol, Sequence, Status
from oarlock.engine.types import BAN, FORCE, banned_always, penalises
from oarlock.workers.protocol import mask_words
from oarlock.workers.sampling_parameters import PENALTIES

Word = tuple[int, ...]
_Split = tuple[dict[int, "_Node"], list[int]]  # children by the preceding token; last ids of the words that end here
_Node = list[Word] | _Split  # the words below the node, until it is first reached
Ids = Tokens  # a tuple or array of ints, or a tuple of tuples of ints


class BadWords:
    """Tree of the bad words of one request, shared by its choices.

    The cost of finding ids that would complete a word does not depend on the number of words: words form a tree by
    their tokens in reverse order, without the last token, which is the id to ban. Each step walks the tree from the
    newest token backwards while some word matches, at most the length of the longest word. A node is split when it is
    first reached, so words with a prefix that is never generated cost nothing.
    """

    def __init__(self, words: Tokens[Word]) -> None:
        self.key = words
        self._root: dict[int, _Node] = _split([word for word in words if len(word) > 1], 0)[0]

    def completed_by(self, token_ids: Tokens[int], most: int, more: Tokens[int] = ()) -> list[int]:
        """Return the last ids of the words whose other tokens end the sequence `token_ids` + `more`.

        Only `more` and the last `most` of `token_ids` count.
        """
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
    """Return a node for `words`. The `depth` ids before their last one are the path to the node."""
    deeper: defaultdict[int, list[Word]] = defaultdict(list)
    ends = []
    length, before = depth + 1, -2 - depth
    for word in words:
        if len(word) == length:
            ends.append(word[-1])
        else:
            deeper[word[before]].append(word)
    return {**deeper}, ends


class HasKey(Protocol):
    """A value that keeps its key alive: while it lives, no other object can have the same identity."""

    key: Ids


V = TypeVar("V", bound=HasKey)


class IdentityCache(Generic[V]):
    """Values computed from a long list of ids, for all sequences with the same list object: the choices of a request.

    `messages.RequestReader` gives them the same object. Hashing or comparing a list as long as a context would cost as
    much as the cache saves. A value is dropped together with the last sequence that uses it.
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
    """The mask of `allowed_token_ids`: uint32, with just enough words for the largest id."""

    def __init__(self, ids: Tokens[int]) -> None:
        self.key = ids
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

    def step_bans(self, num_generated: int) -> list[int]:
        """Return the ids that the bias bans after `num_generated` tokens, in addition to the ids it always bans."""
        return self._stop_ids if num_generated < self._min_tokens else []

    def bias(self, step_bans: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids, int32 [m], and the values to add to their logits, float32 [m]. An id may occur twice."""
        if not step_bans:
            return self._ids, self._values
        values = np.full(len(step_bans), -np.inf, np.float32)
        return np.concatenate([self._ids, np.array(step_bans, np.int32)]), np.concatenate([self._values, values])

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
        """Narrow `masks`, uint32 [1 + drafts, W], which allow the grammar's ids or all ids.

        The last `num_generated` of `token_ids` were generated; row j follows them and `drafts[:j]`. `bans`: the result
        of `step_bans` by row.
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


def _bits(ids: Tokens[int], vocab_size: int) -> np.ndarray:
    """Return uint32 [ceil(vocab / 32)]: bit v % 32 of word v // 32 is set for each v of `ids`."""
    flags = np.zeros(mask_words(vocab_size) * 32, np.uint8)
    flags[np.array(ids, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4")


ALL = 0xFFFFFFFF

# A matcher, the tokens drafted after the known tokens, and the masks to write: uint32 [1 + drafts, W].
GrammarRows = tuple[GrammarMatcherProtocol, tuple[int, ...], np.ndarray]
# Writes the masks of all matchers. Returns the result or exception of each `GrammarMatcherProtocol.fill_masks`.
FillMasks = Callable[[list[GrammarRows]], list[int | Exception | None]]


def fill_one_by_one(rows: list[GrammarRows]) -> list[int | Exception | None]:
    """Fill the masks of one matcher after the other: the simple `FillMasks`."""
    results: list[int | Exception | None] = []
    for matcher, drafts, masks in rows:
        try:
            results.append(matcher.fill_masks(drafts, masks))
        except Exception as error:
            results.append(error)
    return results


@dataclass(slots=True)
class MaskedRows:
    """Masked rows of one sequence: its next row, and a row after each of its drafted tokens."""

    seq: Sequence
    constraints: Constraints
    num_generated: int  # tokens that the sequence will have generated before the first row
    bans: list[list[int]]  # per row: ids that the step's bias bans now, in addition to the always banned ids
    drafts: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether the sequence still runs. If it has ended or was preempted, its sampled token is dropped."""
        return self.seq.status is Status.RUNNING


class GrammarBitmask:
    """Masks of one step, computed while the ranks run it: they need the masks only when they sample."""

    def __init__(self, masked: list[MaskedRows], num_words: int) -> None:
        """`masked`: in the order of the step's rows. `num_words`: of one mask."""
        self._masked = masked
        self._shape = sum(len(rows.bans) for rows in masked), num_words
        self.failed: dict[Sequence, Exception] = {}  # sequences without a mask -> the reason
        self.complete: list[Sequence] = []  # sequences whose grammar allows only the end

    @property
    def allow_all(self) -> np.ndarray:
        """uint32 [G, W], read-only: every id is allowed."""
        return np.broadcast_to(np.uint32(ALL), self._shape)

    @property
    def follows_tokens(self) -> bool:
        """Whether any of these masks depends on generated tokens."""
        return any(rows.constraints.follows_tokens for rows in self._masked)

    @property
    def must_wait(self) -> bool:
        """Whether a mask depends on a token that is unknown until the output of the previous step arrives."""
        return any(rows.num_generated > rows.seq.num_generated_tokens for rows in self._masked)

    def compute(self, fill_masks: FillMasks = fill_one_by_one) -> np.ndarray:
        """Compute uint32 [G, W]. A sequence that has ended or ends here allows every id, since its token is dropped."""
        bits = np.empty(self._shape, np.uint32)
        live: list[tuple[MaskedRows, np.ndarray]] = []
        grammars: list[tuple[Sequence, GrammarRows]] = []
        last = 0
        for rows in self._masked:
            first, last = last, last + len(rows.bans)
            if rows.is_live:
                live.append((rows, bits[first:last]))
            if rows.is_live and rows.seq.grammar_matcher is not None:
                grammars.append((rows.seq, (rows.seq.grammar_matcher, rows.drafts, bits[first:last])))
            else:
                bits[first:last] = ALL
        self._fill(grammars, fill_masks)
        for rows, masks in live:
            if rows.seq not in self.failed and rows.seq not in self.complete:
                rows.constraints.narrow(rows.seq.token_ids, rows.num_generated, rows.drafts, rows.bans, masks)
        return bits

    def _fill(self, grammars: list[tuple[Sequence, GrammarRows]], fill_masks: FillMasks) -> None:
        """Fill the masks of sequences with grammars."""
        if not grammars:
            return
        results = fill_masks([rows for _, rows in grammars])
        for (seq, (_, _, masks)), result in zip(grammars, results, strict=True):
            if isinstance(result, Exception):
                self.failed[seq] = result
            elif result == 0:
                self.complete.append(seq)
            else:
                continue
            masks[:] = ALL


ALWAYS = np.iinfo(np.int64).max
_NO_INTS = np.empty(0, np.int32)
# index into the L rows, its sequence, number of tokens generated before this row, drafts
ConstrainedRow = tuple[int, Sequence, int, tuple[int, ...]]
NO_BIAS = {"bias_rows": _NO_INTS, "bias_ids": _NO_INTS, "bias_values": np.empty(0, np.float32)}


class _PromptIds:
    """The distinct ids of one prompt, in order: int32 [p]."""

    def __init__(self, prompt_token_ids: Tokens[int]) -> None:
        self.key = prompt_token_ids
        ids = np.sort(np.array(prompt_token_ids, np.int32))
        self.ids = ids[np.diff(ids, prepend=-1) > 0]


_prompts = IdentityCache(_PromptIds)


class FirstHistory:
    """Distinct ids of one sequence's prompt, if penalties count them, and the history made from them."""

    def __init__(self, seq: Sequence) -> None:
        request = seq.request
        counts = request.params.repetition_penalty != 1  # the other penalties count only generated ids
        self._prompt = _prompts.get(request.prompt_token_ids) if counts else None

    def of(self, seq: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct ids in order, and how often each was generated: int32 [n] each.

        Ids that occur only in the prompt have the count 0.
        """
        prompt = _NO_INTS if self._prompt is None else self._prompt.ids
        if len(seq.token_ids) == seq.num_prompt_tokens:
            return prompt, np.zeros_like(prompt)
        generated = np.array(seq.token_ids[seq.num_prompt_tokens :], np.int32)
        ids, times = np.unique(generated, return_counts=True)
        every = np.union1d(prompt, ids)
        counts = np.zeros_like(every)
        counts[np.searchsorted(every, ids)] = times
        return every, counts


class SamplingState:
    """Sampling state of one sequence, kept from step to step in `Sequence.sampling_state`. Made when first needed."""

    __slots__ = ("constraints", "history")

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        self.constraints = Constraints(seq, vocab_size)
        self.history: FirstHistory | None = FirstHistory(seq) if penalises(seq.request.params) else None


def constrained_until(seq: Sequence) -> int:
    """Return the first position from which on `seq` needs none of these sections."""
    params = seq.request.params
    if seq.masking_param or penalises(params):
        return ALWAYS
    return seq.num_prompt_tokens + params.min_tokens if seq.stop_ids else 0


def build_sampling_metadata(
    rows: list[ConstrainedRow], vocab_size: int
) -> tuple[dict[str, np.ndarray], GrammarBitmask | None]:
    """Return sections of `StepMetadata`, by field name, for `rows`, in index order.

    Also returns the masks whose bits are computed later, or None if they are complete.
    """
    biases: list[tuple[int, np.ndarray, np.ndarray]] = []
    masked: list[MaskedRows] = []
    mask_rows: list[int] = []
    penalised: list[tuple[int, Sequence]] = []
    for index, seq, num_generated, drafts in rows:
        state = _state(seq, vocab_size)
        constraints = state.constraints
        bans = constraints.step_bans(num_generated)
        ids, values = constraints.bias(bans)
        if len(ids):
            biases.append((index, ids, values))
        if constraints.has_mask:
            mask_rows.append(index)
            if masked and masked[-1].seq is seq:  # the row after a draft
                masked[-1].bans.append(bans)
            else:
                masked.append(MaskedRows(seq, constraints, num_generated, [bans], drafts))
        if penalises(seq.request.params):
            penalised.append((index, seq))
    sections = {
        **(_bias_sections(biases) if biases else NO_BIAS),
        **(_penalty_sections(penalised) if penalised else {}),
    }
    if not masked:
        return sections, None
    sections["mask_rows"] = np.array(mask_rows, np.int32)
    masks = GrammarBitmask(masked, mask_words(vocab_size))
    if masks.follows_tokens:
        sections["mask_bits"] = masks.allow_all
        return sections, masks
    sections["mask_bits"] = masks.compute()
    return sections, None


def _state(seq: Sequence, vocab_size: int) -> SamplingState:
    if seq.sampling_state is None:
        seq.sampling_state = SamplingState(seq, vocab_size)
    assert isinstance(seq.sampling_state, SamplingState)
    return seq.sampling_state


def _bias_sections(biases: list[tuple[int, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    rows, ids, values = zip(*biases, strict=True)
    return {
        "bias_rows": np.repeat(np.array(rows, np.int32), [len(some) for some in ids]),
        "bias_ids": np.concatenate(ids),
        "bias_values": np.concatenate(values),
    }


def _penalty_sections(penalised: list[tuple[int, Sequence]]) -> dict[str, np.ndarray]:
    params = [seq.request.params for _, seq in penalised]
    return {
        "penalty_rows": np.array([index for index, _ in penalised], np.int32),
        **{row.column: np.array([getattr(one, row.name) for one in params], row.dtype) for row in PENALTIES},
    }


def history_sections(seqs: list[Sequence]) -> dict[str, np.ndarray]:
    """Return the whole histories of `seqs`, which have penalties and whose tokens are all known."""
    found = []
    for seq in seqs:
        assert isinstance(seq.sampling_state, SamplingState) and seq.sampling_state.history is not None
        found.append(seq.sampling_state.history.of(seq))
    starts = np.zeros(len(found) + 1, np.int32)
    np.cumsum([len(ids) for ids, _ in found], out=starts[1:])
    return {
        "history_rows": np.array([seq.row for seq in seqs], np.int32),
        "history_starts": starts,
        "history_ids": np.concatenate([ids for ids, _ in found]),
        "history_counts": np.concatenate([counts for _, counts in found]),
    }
