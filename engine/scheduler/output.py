"""What one step decides and what the ranks answer to it, between scheduler, input batch and engine core."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.scheduler.sequence import Sequence
from engine.types import ScoredTokens, TokenLogprobs
from workers.protocol import FINITE

if TYPE_CHECKING:
    from workers.protocol import StepOutput

Scores = ScoredTokens | tuple[()]  # of the prompt tokens that one step scored


@dataclass(slots=True)
class ScheduledTokens:
    """Some tokens of one sequence: `token_ids[start : start + num_tokens]`, or the one that the step before samples.

    Its rows of logits are, in this order: `num_scored` prompt tokens from position `score_from` on, each predicting its
    successor, then one for the next token if `wants_logits`.
    """

    seq: Sequence
    start: int
    num_tokens: int
    wants_logits: bool
    score_from: int = 0
    num_scored: int = 0


@dataclass(slots=True)
class SchedulerOutput:
    """The decision for one step."""

    step_id: int
    scheduled: list[ScheduledTokens]
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (row, column of its table, block id)
    new_rows: list[Sequence] = field(default_factory=list)  # sequences that have got their row in this step
    num_preempted: int = 0
    num_decodes: int = 0  # running sequences that get their one token
    num_prompt_tokens: int = 0  # of all others

    def add_blocks(self, seq: Sequence, first_column: int) -> None:
        """The table of `seq` has new blocks from `first_column` on."""
        self.new_blocks += [
            (seq.row, column, block) for column, block in enumerate(seq.block_ids[first_column:], first_column)
        ]


@dataclass(slots=True)
class ModelRunnerOutput:
    """The ranks' answer as plain lists, one entry per row of logits in the order of the scheduled tokens."""

    token_ids: list[int]
    finite: list[int]  # FINITE, NONFINITE or ALL_BANNED
    logprobs: list[float] | None = None
    ranks: list[int] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    answer: "StepOutput | None" = None  # the same as arrays
    all_finite: bool = field(init=False)

    def __post_init__(self) -> None:
        self.all_finite = self.finite.count(FINITE) == len(self.finite)

    def token_logprobs(self, row: int, num_top: int) -> TokenLogprobs:
        """The sampled token of `row` with its `num_top` best alternatives."""
        assert self.logprobs is not None and self.ranks is not None
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            assert self.top_ids is not None and self.top_logprobs is not None
            top = tuple(zip(self.top_ids[row][:num_top], self.top_logprobs[row][:num_top], strict=True))
        return TokenLogprobs(self.token_ids[row], self.logprobs[row], self.ranks[row], top)

    def scored(self, first: int, last: int, num_top: int) -> ScoredTokens:
        """The prompt tokens scored in rows `first` to `last` (exclusive), with `num_top` alternatives each."""
        answer = self.answer
        assert answer is not None and answer.logprobs is not None and answer.ranks is not None
        assert answer.top_ids is not None and answer.top_logprobs is not None
        ints = (answer.token_ids[first:last], answer.ranks[first:last], answer.top_ids[first:last, :num_top])
        floats = (answer.logprobs[first:last], answer.top_logprobs[first:last, :num_top])
        token_ids, ranks, top_ids = (array("i", column.tobytes()) for column in ints)
        logprobs, top_logprobs = (array("f", column.tobytes()) for column in floats)
        return ScoredTokens(num_top, token_ids, ranks, logprobs, top_ids, top_logprobs)
