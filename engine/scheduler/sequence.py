"""State of one request from its arrival to its end, the decision of what of it runs in a step, and the ranks' answer.

Knows token ids and block ids. Does not know policy (`scheduler.py`), free blocks (`kv_cache/manager.py`) or arrays.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from math import isnan, nan
from typing import NamedTuple, Protocol

import numpy as np

from oarlock.engine.kv_cache.manager import Shortage
from oarlock.engine.kv_cache.offload import Copies
from oarlock.engine.scheduler.timeline import RequestTimeline
from oarlock.engine.spec_decode.drafter import DraftState
from oarlock.engine.types import Request, ScoredTokens
from oarlock.workers.protocol import FINITE, NOT_POOLED, StepOutput


class Status(Enum):
    """Status of a sequence. FINISHED is final: the answer to a step still in flight for it is ignored."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrammarMatcherProtocol(Protocol):
    """Matcher of one sequence with its grammar. Equal calls give equal answers: no clock, no randomness.

    It is made before `Scheduler.add` and lives as long as its sequence:

        GrammarBitmask.compute         `fill_masks` in each step that samples a token, possibly twice
        Scheduler.update_from_output   `accept` of sampled tokens up to a stop token; `only_end_is_left` where the
                                       sequence ends by its length
        preemption                     no call: recomputed tokens are not accepted again
        end, failure, abort            no call

    A `BrokenGrammarError` ends that one request by the fault of its grammar, any other exception by the engine's.
    `MaskPostponedError` from `fill_masks` preempts it.
    """

    @property
    def expected_s(self) -> float:
        """Seconds that the next mask is expected to take; 0.0 for a fast grammar. Only this depends on a clock."""
        ...

    def fill_masks(self, drafts: Tokens[int], into: "np.ndarray") -> int | None:
        """Write the mask of the next token and those after each of `drafts`, uint32 [1 + drafts, ceil(vocab / 32)].

        Bit v % 32 of word v // 32: id v may come next. End-of-sequence ids are set where the grammar may end. Every id
        is allowed behind a draft that cannot be accepted. Every word is written, and nothing else is changed: it may be
        called again for the same token.

        Returns how many drafts may be accepted before only the end is left; None where more may follow. At 0 the
        sequence ends now, whatever `min_tokens` is, without an end-of-sequence token.
        """

    def accept(self, token_ids: Tokens[int]) -> bool:
        """Move on by `token_ids`. True when only the end is known to be left; False leaves it to `fill_masks` to find
        that. No id but the last may complete the grammar."""

    def only_end_is_left(self) -> bool:
        """Whether `fill_masks` would return 0 for the next token."""


class RowState(Protocol):
    """State of running sequences that changes with every token, by row: part of `DecodeState`."""

    num_computed: "np.ndarray"  # int64 [rows]
    last_token_s: "np.ndarray"  # float64 [rows]   nan: none yet
    num_recent: "np.ndarray"  # int64 [rows]   tokens that `settle` has yet to append to the sequence's list

    def settle(self, row: int) -> None: ...


class Sequence:
    """One request while it waits and runs.

    `token_ids` are all tokens known so far. Keys and values of the first `num_computed_tokens` tokens exist when all
    steps scheduled so far have run; the last of these tokens is not known while the step that samples it runs. Drafts
    count as computed until the answer tells how many were right.

    While it runs, `decode_state` keeps what changes with every token; `DecodeState.refresh` updates there what follows
    from other attributes. `timeline` is the record of its life.
    """

    __slots__ = (
        "_last_token_s",
        "_num_computed_tokens",
        "_token_ids",
        "block_hashes",
        "block_ids",
        "decode_state",
        "decodes_alone",
        "draft_state",
        "final_len",
        "grammar_matcher",
        "has_asked_files",
        "is_watched",
        "key",
        "num_cached_blocks",
        "num_freed_blocks",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_returned_vectors",
        "num_scored_tokens",
        "num_to_compute",
        "pooling",
        "request",
        "request_id",
        "row",
        "samples",
        "sampling_state",
        "shortage",
        "status",
        "stop_ids",
        "timeline",
    )

    def __init__(
        self,
        request: Request,
        *,
        key: tuple[float, int],
        max_len: int,
        arrival_s: float,
        grammar_matcher: GrammarMatcherProtocol | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.pooling = request.pooling
        self.samples = params.max_tokens > 0  # False when only the prompt is to be scored
        self.key = key  # order of service: the smallest runs first and is preempted last
        self._token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self._token_ids)
        # The sequence ends at this many tokens at the latest, prompt and generated ones together.
        self.final_len = min(self.num_prompt_tokens + params.max_tokens, max_len)
        # Every token is computed except the last one generated, which predicts nothing.
        self.num_to_compute = max(self.num_prompt_tokens, self.final_len - 1)
        self.decode_state: RowState | None = None  # None: it does not run
        self._num_computed_tokens = 0
        self.decodes_alone = not self.samples  # its decode steps are scheduled as `ScheduledTokens`
        # Whether each of its tokens takes more work than to append it.
        self.is_watched = grammar_matcher is not None
        self.block_ids: list[int] = []
        self.num_freed_blocks = 0  # leading entries of `block_ids` that are the null block: outside the sliding window
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks, as far as they were needed
        self.num_cached_blocks = 0  # leading blocks that were offered to the prefix cache
        self.shortage: Shortage | None = None  # the last refusal of blocks
        self.has_asked_files = False  # since it last began to wait: whether files hold its beginning
        self.row = -1  # of the engine's tables; stable while the sequence runs
        self.status = Status.WAITING
        self.stop_ids = frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids)
        self.grammar_matcher = grammar_matcher
        self.sampling_state: object | None = None  # owned by the input batch; kept over a preemption
        self.draft_state: DraftState | None = None  # None: nothing was drafted for it
        self.num_scored_tokens = 0  # prompt tokens whose logprobs were sent; a preemption does not reset it
        self.num_returned_vectors = 0  # of single tokens, the first ones; a preemption does not reset it
        self.num_preemptions = 0
        self.num_passed = 0  # sequences that were admitted before this one, since it last began to wait
        self.timeline = RequestTimeline(self.request_id, self.num_prompt_tokens, arrival_s)
        self._last_token_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens known so far; always the same list. Decodes append to it when it is next asked for."""
        state = self.decode_state
        if state is not None and state.num_recent[self.row]:
            state.settle(self.row)
        return self._token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed by the steps scheduled so far, the last of which may still run."""
        return self._num_computed_tokens if self.decode_state is None else int(self.decode_state.num_computed[self.row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self.decode_state is None:
            self._num_computed_tokens = value
        else:
            self.decode_state.num_computed[self.row] = value

    @property
    def last_token_s(self) -> float | None:
        """Time at which the newest token was sampled."""
        if self.decode_state is None:
            return self._last_token_s
        last_s = float(self.decode_state.last_token_s[self.row])
        return None if isnan(last_s) else last_s

    @last_token_s.setter
    def last_token_s(self, value: float | None) -> None:
        if self.decode_state is None:
            self._last_token_s = value
        else:
            self.decode_state.last_token_s[self.row] = nan if value is None else value

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def masked_by(self) -> str | None:
        """The field of the request that may leave no token to choose; of several the strictest."""
        params = self.request.params
        if params.grammar is not None:
            return params.grammar.param
        if params.allowed_token_ids is not None:
            return "allowed_token_ids"
        return "bad_words" if params.bad_words else "logit_bias" if params.logit_bias else None

    @property
    def returns_all_tokens(self) -> bool:
        """Whether the hidden state of each of its tokens is wanted."""
        return self.pooling is not None and self.pooling.kind == "token"

    @property
    def num_skippable_tokens(self) -> int:
        """Number of leading tokens that need not run when their KV is cached: those before the first that is still to
        be scored, or whose hidden state is still to be returned."""
        params = self.request.params
        if self.pooling is not None and self.pooling.kind in ("mean", "cls", "token"):
            is_returned = self.pooling.kind == "cls" and self.num_returned_vectors
            return len(self.token_ids) if is_returned else self.num_returned_vectors
        if params.prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1:
            return len(self.token_ids)
        return self.num_scored_tokens

    def tokens_to_score(self, start: int, num_tokens: int) -> tuple[int, int]:
        """(first position, count) of the prompt tokens to score when `num_tokens` tokens from `start` on are computed.

        The prompt's last token is not among them: it predicts a sampled one.
        """
        if self.request.params.prompt_logprobs is None:
            return 0, 0
        first = max(start, self.num_scored_tokens)
        return first, max(0, min(start + num_tokens, self.num_prompt_tokens - 1) - first)


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
