"""The state of one running request, and what one step decided. Private to the engine and mutable.

A grammar's state lives here too, from the door to the end of its sequence:

    Scheduler.add(request, now, grammar_state)    made outside; without one, a request with a grammar cannot run
    GrammarBitmask.fill                           `fill_mask` for each step in which a token is sampled, maybe twice,
                                                  maybe in another thread while this one is busy with the step
    Scheduler.update_from_output                  `accept` once per sampled token, unless the token is a stop token
    preemption                                    nothing: the state is kept, recomputed tokens are not accepted again
    end, failure, abort                           nothing: the state goes with the sequence

An exception from either call ends that one request, with the blame on us.

Knows token ids and block ids. Does not know policy (`scheduler.py`), memory accounting (`blocks.py`) or arrays.
"""

from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from engine.types import Request, ScoredTokens

if TYPE_CHECKING:
    import numpy as np

    from workers.protocol import StepOutput


class Status(Enum):
    """Where a sequence stands. FINISHED is final: a step still in flight for it is ignored."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. The same calls give the same answers: no clock, no chance."""

    def fill_mask(self, into: "np.ndarray") -> None:
        """Write the mask of the next token into `into`, uint32 [ceil(vocab / 32)], every word of it.

        Bit v % 32 of word v // 32: id v may come next. Ends (end-of-sequence ids) are set where the grammar may end.
        Changes nothing else: it may be called again for the same token.
        """

    def accept(self, token_ids: Tokens[int]) -> bool:
        """Move on by `token_ids`. True when the grammar is complete and nothing may follow: the sequence ends there,
        whatever `min_tokens` says, and no end-of-sequence token is waited for."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there were no blocks for a sequence, in the block manager's terms."""

    floor: int  # it cannot be given blocks before so many were released, ever, in addition to the reserve
    awaited: bytes | None  # unless the block of this digest is published


class Sequence:
    """One request on its way. `token_ids` is what is known, `num_computed_tokens` is what has KV."""

    __slots__ = (
        "arrival_s",
        "block_ids",
        "digests",
        "first_scheduled_s",
        "first_token_s",
        "grammar_state",
        "key",
        "last_token_s",
        "max_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_freed_blocks",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scored_tokens",
        "request",
        "row",
        "sampling_state",
        "shortage",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        *,
        key: tuple[float, int],
        max_len: int,
        arrival_s: float,
        grammar_state: GrammarState | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.key = key  # the smaller runs first and is preempted last
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_len = max_len  # prompt and generated tokens together never exceed it
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.num_freed_blocks = 0  # leading columns of `block_ids` that hold the null block: outside the window
        self.digests: list[bytes] = []  # chained hashes of the full blocks, as far as anyone asked
        self.num_published_blocks = 0
        self.shortage: Shortage | None = None  # the last refusal of blocks, while it holds
        self.row = -1  # stable while the sequence runs
        self.status = Status.WAITING
        self.stop_ids = frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids)
        self.grammar_state = grammar_state
        self.sampling_state: object | None = None  # owned by the input batch; kept over a preemption
        self.num_scored_tokens = 0  # of the prompt: those whose logprobs have left, which no preemption takes back
        self.num_cached_tokens = 0  # of the prompt, at its first admission
        self.num_preemptions = 0
        self.num_passed = 0  # others that were let in before it, since it last began to wait
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def samples(self) -> bool:
        """False when only the prompt is to be scored."""
        return self.request.params.max_tokens > 0

    @property
    def masked_by(self) -> str | None:
        """The field by which the request itself may leave no token to choose; of several the strictest."""
        params = self.request.params
        if params.grammar is not None:
            return params.grammar.param
        if params.allowed_token_ids is not None:
            return "allowed_token_ids"
        return "bad_words" if params.bad_words else "logit_bias" if params.logit_bias else None

    @property
    def num_skippable_tokens(self) -> int:
        """How many leading tokens need not run when their KV is at hand: all but those still to be scored."""
        params = self.request.params
        if params.prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1:
            return len(self.token_ids)
        return self.num_scored_tokens


@dataclass(slots=True)
class ScheduledTokens:
    """Some tokens of one sequence: `token_ids[start : start + num_tokens]`.

    Its rows of logits are, in this order: `num_scored` prompt tokens from position `score_from` on, each predicting its
    successor, then one for the next token if `wants_logits`.
    """

    seq: Sequence
    start: int
    num_tokens: int
    wants_logits: bool
    score_from: int = 0
    num_scored: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_scored + self.wants_logits


@dataclass(slots=True)
class SchedulerOutput:
    """The decision for one step."""

    step_id: int
    work: list[ScheduledTokens]
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (row, column, block id)
    new_rows: list[Sequence] = field(default_factory=list)  # sequences whose row was not theirs in the last step
    num_preempted: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """The ranks' answer as plain lists, one entry per row of logits in the order of the work."""

    token_ids: list[int]
    finite: list[int]  # FINITE, NONFINITE or ALL_BANNED
    logprobs: list[float] | None = None
    ranks: list[int] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    answer: "StepOutput | None" = None  # the same as it came

    def scored(self, first: int, last: int, num_top: int) -> ScoredTokens:
        """Rows `first` to `last`, whose prompt tokens were scored."""
        answer = self.answer
        assert answer is not None and answer.logprobs is not None and answer.ranks is not None
        assert answer.top_ids is not None and answer.top_logprobs is not None
        ints = (answer.token_ids[first:last], answer.ranks[first:last], answer.top_ids[first:last, :num_top])
        floats = (answer.logprobs[first:last], answer.top_logprobs[first:last, :num_top])
        token_ids, ranks, top_ids = (array("i", column.tobytes()) for column in ints)
        logprobs, top_logprobs = (array("f", column.tobytes()) for column in floats)
        return ScoredTokens(num_top, token_ids, ranks, logprobs, top_ids, top_logprobs)
