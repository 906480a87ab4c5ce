"""Chooses the number of tokens to draft for each sequence of a step: as many as are likely to be worth their rows.

A further row makes a step a little longer, and an accepted draft saves a row of a later step. A draft is made while the
tokens it is expected to add, by the seconds it adds, exceed the tokens a second of the step without it.
Where steps mostly read weights, rows cost little and drafts are long; with many sequences each row costs its share, and
no drafts are made. Times decide how many tokens are drafted, and never which token is next.

Knows token ids and the times of steps; does not know requests, blocks or why a draft was wrong.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.spec_decode.ngram_index import NgramIndex

_FIRST_RATE = 0.6  # of a sequence without drafts so far: it begins with about 4 drafts where rows cost little
_WEIGHT = 0.2  # of the newest draft in a sequence's rate
_RETRY_TOKENS = 128  # of one sequence without a draft, after which it is tried as if it were new
_MARGIN = 1.5  # by how much a draft must be worth more than it costs: the costs are estimates


class DraftState:
    """Draft statistics and n-gram index of one sequence."""

    __slots__ = ("drafted_at", "index", "rate")

    def __init__(self, config: SpeculativeConfig) -> None:
        self.index = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self.rate = _FIRST_RATE  # how often a draft was right if those before it were: a moving mean
        self.drafted_at: int | None = None  # length of the sequence when the last draft was made

    def rate_at(self, length: int) -> float:
        """Expected rate of the next draft. After a long time without one the text may be of another kind."""
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
    room: int  # most drafts


class RowCosts(Protocol):
    """Source of the step times that drafts depend on."""

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a step of `num_rows` rows, and of one row more."""
        ...


class Drafter:
    """Chooses the drafts of a step."""

    def __init__(self, config: SpeculativeConfig, costs: RowCosts) -> None:
        self.config = config
        self._costs = costs

    def new_state(self) -> DraftState:
        """Make the state of a sequence without drafts so far."""
        return DraftState(self.config)

    def may_pay(self, num_seqs: int) -> bool:
        """Whether any draft can be worth its row in a step with a row for each of `num_seqs` sequences."""
        step_s, row_s = self._costs.step_and_row_s(num_seqs)
        return _is_worth(1.0, row_s, step_s, num_seqs)

    def choose(self, candidates: Sequence[Candidate], num_seqs: int, most: int) -> list[list[int]]:
        """Choose the drafts of each candidate, often none, for a step in which `num_seqs` sequences decode: at most
        `most` in all.

        Changes only the n-gram indexes: it may be called again for the same step.
        """
        drafts: list[list[int]] = [[] for _ in candidates]
        step_s, row_s = self._costs.step_and_row_s(num_seqs)
        offers: list[tuple[float, int]] = []  # (worth of one more draft, negative; its candidate)
        for place, (state, token_ids, room) in enumerate(candidates):
            worth = rate = state.rate_at(len(token_ids))
            worths: list[float] = []  # of each draft in turn: it must be right, and so must all before it
            longest = min(room, self.config.num_speculative_tokens)
            while len(worths) < longest and _is_worth(worth, row_s, step_s, num_seqs):
                worths.append(worth)
                worth *= rate
            if worths:
                drafts[place] = state.index.propose(token_ids, len(worths))
                offers += [(-worth, place) for worth in worths[: len(drafts[place])]]
        taken = [0] * len(drafts)
        tokens = float(num_seqs)  # expected of the step
        for negative, place in sorted(offers)[:most]:
            if not _is_worth(-negative, row_s, step_s, tokens):
                break
            tokens -= negative
            step_s += row_s
            taken[place] += 1
        return [some[:count] for some, count in zip(drafts, taken, strict=True)]


def _is_worth(worth: float, row_s: float, step_s: float, tokens: float) -> bool:
    """Whether `worth` tokens for `row_s` are more than `tokens` for `step_s`."""
    return worth * step_s > _MARGIN * row_s * tokens
