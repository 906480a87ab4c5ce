"""Draft tokens, found by lookup, and their number for each sequence of a step: only drafts that are worth their rows.

The longest run of a sequence's last tokens that occurs earlier in its prompt or output is looked up, at its latest
occurrence (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding). The tokens that followed it
are the draft. If they reach the end of the sequence, they are repeated, as in LZ77: the sequence is in a loop.

An additional row makes a step a little longer, and an accepted draft saves a row of a later step. A draft is made if
the tokens that it is expected to add, divided by the seconds that it adds, exceed the tokens per second of the step
without it. If steps mostly read weights, rows cost little and drafts are long. With many sequences each row costs its
share, and no drafts are made. Times decide the number of drafts, but never which token is next.

Knows token ids and the times of steps; does not know requests, blocks or why a draft was wrong.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from oarlock.engine.config import SpeculativeConfig

_BASE = 0x9E3779B97F4A7C15  # odd; base of a polynomial over the ids, modulo 2^64
_MASK = (1 << 64) - 1
_FOLD = 4096  # newest tokens, whose runs are kept in dicts, at 300 bytes each; all others take 12 bytes per run length


class NgramIndex:
    """Index of the last occurrence of each run of `shortest` to `longest` tokens of one growing sequence.

    The cost of a new token does not depend on the length of the sequence. Runs are found by 64-bit hashes and then
    compared: two runs with equal hashes would hide a draft, but never give a wrong one.
    """

    __slots__ = ("_hashes", "_last_ends", "_longest", "_num_folded", "_num_seen", "_recent", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest = shortest
        self._longest = longest
        # Lists by length minus `shortest`: sorted hashes, and the index of the last token of the last run with each.
        self._hashes: list[array[int]] = []  # uint64
        self._last_ends: list[array[int]] = []  # int32
        self._recent: list[dict[int, int]] = []  # hash -> that index, for runs that end after the sorted ones
        self._num_folded = 0  # tokens in the sorted part
        self._num_seen = 0  # tokens whose runs are all in one of the two

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Propose `most` tokens after `token_ids`, or none. The sequence may only have grown since the last call."""
        length = len(token_ids)
        self._catch_up(token_ids)
        for size in range(min(self._longest, length - 1), self._shortest - 1, -1):
            end = self._find(token_ids, size)
            if end >= 0:
                start, period = end + 1, length - end - 1
                if period >= most:
                    return token_ids[start : start + most]
                return [token_ids[start + offset % period] for offset in range(most)]
        return []

    def _find(self, token_ids: list[int], size: int) -> int:
        """Return the last earlier index at which the last `size` tokens ended; -1 if there is none."""
        run = token_ids[-size:]
        key, index = _hash(run), size - self._shortest
        end = self._recent[index].get(key, -1)
        if end < 0:
            hashes = self._hashes[index]
            at = bisect_left(hashes, key)
            if at < len(hashes) and hashes[at] == key:
                end = self._last_ends[index][at]
        return end if end >= 0 and token_ids[end - size + 1 : end + 1] == run else -1

    def _catch_up(self, token_ids: list[int]) -> None:
        """Index every run that ends before the last token, since no token follows a run that ends there."""
        until = len(token_ids) - 1
        if not self._recent or until - self._num_folded > _FOLD:
            self._fold(token_ids[:until])
            return
        for end in range(self._num_seen, until):
            for index, recent in enumerate(self._recent):
                start = end + 1 - self._shortest - index
                if start >= 0:
                    recent[_hash(token_ids[start : end + 1])] = end
        self._num_seen = until

    def _fold(self, token_ids: list[int]) -> None:
        """Sort all runs of `token_ids`. This takes a few milliseconds for each 10,000 tokens."""
        self._hashes.clear()
        self._last_ends.clear()
        ids = np.array(token_ids, np.uint64)  # [n]
        for size in range(self._shortest, self._longest + 1):
            keys = np.zeros(max(0, len(ids) - size + 1), np.uint64)  # keys of the runs, by the index of the first token
            for offset in range(size):
                keys = keys * np.uint64(_BASE) + ids[offset : offset + len(keys)]
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
            self._hashes.append(array("Q", keys[is_last].tobytes()))
            self._last_ends.append(array("i", (order[is_last] + size - 1).astype(np.int32).tobytes()))
        self._recent = [{} for _ in self._hashes]
        self._num_folded = self._num_seen = len(token_ids)


def _hash(run: list[int]) -> int:
    key = 0
    for token in run:
        key = (key * _BASE + token) & _MASK
    return key


_FIRST_RATE = 0.6  # initial rate of a sequence: it begins with about 4 drafts if rows cost little
_WEIGHT = 0.2  # weight of the newest draft in a sequence's rate
_RETRY_TOKENS = 128  # a sequence without a draft for this many tokens is tried as if it were new
_MARGIN = 1.5  # factor by which a draft must be worth more than it costs, because the costs are estimates


class DraftState:
    """Draft statistics and n-gram index of one sequence."""

    __slots__ = ("drafted_at", "index", "rate")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self.rate = _FIRST_RATE  # moving mean of how often a draft was right if the drafts before it were
        self.drafted_at: int | None = None  # length of the sequence when the last draft was made

    def rate_at(self, length: int) -> float:
        """Return the expected rate of the next draft. After a long time without drafts the text may be of another
        kind."""
        is_old = self.drafted_at is not None and length - self.drafted_at >= _RETRY_TOKENS
        return max(self.rate, _FIRST_RATE) if is_old else self.rate

    def record(self, length: int, num_drafts: int, num_accepted: int) -> None:
        """Record that `num_accepted` of `num_drafts` drafts for a sequence of `length` tokens were right."""
        assert 0 <= num_accepted <= num_drafts
        self.drafted_at = length
        for _ in range(num_accepted):
            self.rate += _WEIGHT * (1 - self.rate)
        if num_accepted < num_drafts:
            self.rate -= _WEIGHT * self.rate


class Candidate(NamedTuple):
    """A sequence that decodes in the next step."""

    state: DraftState
    token_ids: list[int]
    room: int  # maximum number of drafts


class RowCosts(Protocol):
    """Source of the step times that drafts depend on."""

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a step of `num_rows` rows, and of one more row."""
        ...


class Drafter:
    """Selection of the drafts of a step."""

    def __init__(self, config: SpeculativeConfig, costs: RowCosts) -> None:
        self.config = config
        self._costs = costs

    def new_state(self) -> DraftState:
        """Make the state of a sequence without drafts so far."""
        return DraftState(self.config)

    def may_pay(self, num_seqs: int) -> bool:
        """Return whether any draft can be worth its row in a step with a row for each of `num_seqs` sequences."""
        step_s, row_s = self._costs.step_and_row_s(num_seqs)
        return _is_worth(1.0, row_s, step_s, num_seqs)

    def choose(self, candidates: Sequence[Candidate], num_seqs: int, most: int) -> list[list[int]]:
        """Choose the drafts of each candidate, often none, for a step in which `num_seqs` sequences decode: at most
        `most` in all.

        Changes only the n-gram indexes: it may be called again for the same step.
        """
        drafts: list[list[int]] = [[] for _ in candidates]
        step_s, row_s = self._costs.step_and_row_s(num_seqs)
        offers: list[tuple[float, int]] = []  # (negative worth of one more draft, index of its candidate)
        for index, (state, token_ids, room) in enumerate(candidates):
            worth = rate = state.rate_at(len(token_ids))
            worths: list[float] = []  # worth of each draft in turn: it must be right, and so must all before it
            longest = min(room, self.config.num_speculative_tokens)
            while len(worths) < longest and _is_worth(worth, row_s, step_s, num_seqs):
                worths.append(worth)
                worth *= rate
            if worths:
                drafts[index] = state.index.propose(token_ids, len(worths))
                offers += [(-worth, index) for worth in worths[: len(drafts[index])]]
        taken = [0] * len(drafts)
        tokens = float(num_seqs)  # expected tokens of the step
        for negative, index in sorted(offers)[:most]:
            if not _is_worth(-negative, row_s, step_s, tokens):
                break
            tokens -= negative
            step_s += row_s
            taken[index] += 1
        return [some[:count] for some, count in zip(drafts, taken, strict=True)]


def _is_worth(worth: float, row_s: float, step_s: float, tokens: float) -> bool:
    """Return whether `worth` tokens for `row_s` are more than `tokens` for `step_s`."""
    return worth * step_s > _MARGIN * row_s * tokens
