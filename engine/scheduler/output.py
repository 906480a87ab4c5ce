"""Decision for one step and the ranks' answer to it, between scheduler, input batch and engine core."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from oarlock.engine.kv_cache.offload import Copies
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.types import SampledTokens, ScoredTokens
from oarlock.workers.protocol import FINITE, NOT_POOLED, StepOutput

NOT_KNOWN = -1  # stands for a token that the step before samples

Scores = ScoredTokens | tuple[()]  # of the prompt tokens that one step scored


@dataclass(slots=True)
class ScheduledTokens:
    """Some tokens of one sequence: `token_ids[start : start + num_tokens]`, or the one that the step before samples.

    Its rows of logits are, in this order: `num_scored` prompt tokens from position `score_from` on, each predicting its
    successor, then one for the next token if `wants_logits`. Where `drafts` follow the newest token, they are the last
    of its tokens, and each has one more row, for the token after it.
    """

    seq: Sequence
    start: int
    num_tokens: int
    wants_logits: bool
    score_from: int = 0
    num_scored: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows of logits."""
        return self.num_scored + self.wants_logits + len(self.drafts)


class Decodes(NamedTuple):
    """The newest token of each of D sequences, as arrays. Each has one row of logits, for the token after it."""

    rows: np.ndarray  # int64 [D]   of the engine's tables
    positions: np.ndarray  # int64 [D]
    token_ids: np.ndarray  # int32 [D]   or NOT_KNOWN
    num_released: int  # rows given back until then, by which a later sequence in a row is told apart
    seqs: list[Sequence | None]  # by row of the engine's tables, at present

    def items(self) -> list["ScheduledTokens"]:
        """Decodes as objects. Valid only until the next sequence gets a row."""
        pairs = zip(self.rows.tolist(), self.positions.tolist(), strict=True)
        return [ScheduledTokens(seq, start, 1, True) for row, start in pairs if (seq := self.seqs[row]) is not None]


_NO_ROWS = np.empty(0, np.int64)
NO_DECODES = Decodes(_NO_ROWS, _NO_ROWS, np.empty(0, np.int32), 0, [])


@dataclass(slots=True)
class SchedulerOutput:
    """Decision for one step: first `decodes`, then the other `scheduled` tokens."""

    step_id: int
    scheduled: list[ScheduledTokens]
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (row, column of its table, block id)
    new_rows: list[Sequence] = field(default_factory=list)  # sequences that have got their row in this step
    num_preempted: int = 0
    num_decodes: int = 0  # running sequences that get their one token
    num_drafts: int = 0  # drafted tokens after these
    num_prompt_tokens: int = 0  # tokens of all other sequences
    num_token_vectors: int = 0  # prompt tokens whose hidden states are returned
    decodes: Decodes = NO_DECODES
    kv_copies: Copies | None = None  # made before anything else of the step
    is_ahead: bool = False  # decided while the step before was in flight

    @property
    def num_seqs(self) -> int:
        return len(self.decodes.rows) + len(self.scheduled)

    def items(self) -> list[ScheduledTokens]:
        """All tokens of the step as objects, in its order. Valid only until the next sequence gets a row."""
        return self.decodes.items() + self.scheduled

    def with_rows(self) -> Iterator[tuple[ScheduledTokens, int, int]]:
        """Each item of `scheduled` with its first row of logits, and the row behind its last."""
        first = len(self.decodes.rows)
        for item in self.scheduled:
            end = first + item.num_rows
            yield item, first, end
            first = end

    def add_blocks(self, seq: Sequence, first_column: int) -> None:
        """Add the blocks of `seq` from `first_column` on to the step's new table entries."""
        self.new_blocks += [
            (seq.row, column, block) for column, block in enumerate(seq.block_ids[first_column:], first_column)
        ]


class ModelRunnerOutput:
    """Answer of the ranks: arrays, and plain lists for reading single numbers, which numpy makes slow.

    One entry per row of logits: those of `Decodes`, then those of the `ScheduledTokens`, in their order.
    """

    def __init__(self, answer: StepOutput) -> None:
        self.answer = answer
        self.all_finite = answer.finite.tobytes().count(FINITE) == len(answer.finite)  # uint8

    @cached_property
    def is_finite(self) -> np.ndarray:
        """bool [L]"""
        return self.answer.finite == FINITE

    def are_finite(self, first: int, end: int) -> bool:
        """Whether all rows from `first` to `end` (exclusive) are finite."""
        return self.all_finite or bool(self.is_finite[first:end].all())

    @cached_property
    def token_ids(self) -> list[int]:
        return self.answer.token_ids.tolist()

    @cached_property
    def finite(self) -> list[int]:
        """State of each row: FINITE, NONFINITE or ALL_BANNED."""
        return self.answer.finite.tolist()

    def pooled(self) -> Iterator[array | None]:
        """Values of each pooled sequence, float32, in order; None: they are not finite."""
        start = 0
        for length in self.answer.pooled_lens.tolist():
            if length == NOT_POOLED:
                yield None
            else:
                yield array("f", self.answer.pooled[start : start + length].tobytes())
                start += length

    def num_accepted(self, place: int, row: int) -> int:
        """Number of right drafts of the step's sequence at `place`, whose first row is `row`. They end before a draft
        that no token can follow: it is left to the next step, in which it comes first."""
        assert self.answer.num_accepted is not None
        count = int(self.answer.num_accepted[place])
        states = self.is_finite[row + 1 : row + 1 + count]
        return count if states.all() else int(states.argmin())

    @cached_property
    def _logprobs(self) -> ScoredTokens:
        assert self.answer.top_ids is not None
        return self.scored(slice(None), self.answer.top_ids.shape[1])

    def sampled(self, row: int, count: int, num_top: int) -> SampledTokens:
        """The tokens sampled in `count` rows from `row` on, with their `num_top` best alternatives."""
        return SampledTokens(self._logprobs, row, count, num_top)

    def scored(self, rows: slice | np.ndarray, num_top: int) -> ScoredTokens:
        """The tokens scored or sampled in `rows` of logits, with `num_top` alternatives each."""
        answer = self.answer
        assert answer.logprobs is not None and answer.ranks is not None
        assert answer.top_ids is not None and answer.top_logprobs is not None
        ints = (answer.token_ids[rows], answer.ranks[rows], answer.top_ids[rows, :num_top])
        floats = (answer.logprobs[rows], answer.top_logprobs[rows, :num_top])
        token_ids, ranks, top_ids = (array("i", column.tobytes()) for column in ints)
        logprobs, top_logprobs = (array("f", column.tobytes()) for column in floats)
        return ScoredTokens(num_top, token_ids, ranks, logprobs, top_ids, top_logprobs)
