"""State of one request from arrival to end, the decision of which tokens run in a step, and the ranks' output.

Knows token ids and block ids. Does not know policy (`scheduler.py`), free blocks (`kv_cache/sequence_memory.py`) or
arrays.
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

from oarlock.engine.kv_cache.manager import BlockTable, Shortage, TableEntry
from oarlock.engine.kv_cache.offload import Copies
from oarlock.engine.kv_cache.state_slots import HeldSlots
from oarlock.engine.lora.registry import Adapter
from oarlock.engine.scheduler.timeline import RequestTimeline
from oarlock.engine.spec_decode.drafter import DraftState
from oarlock.engine.types import Request, ScoredTokens
from oarlock.workers.adapters import AdapterCommand
from oarlock.workers.protocol import FINITE, NOT_POOLED, StepOutput


class Status(Enum):
    """Status of a sequence. FINISHED is final: results of steps in flight for the sequence are then ignored."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrammarMatcherProtocol(Protocol):
    """Grammar matcher of one sequence. Deterministic: equal calls return equal results, without clock or randomness.

    It is created before `Scheduler.add` and lives as long as its sequence:

        GrammarBitmask.compute         `fill_masks` in each step that samples a token, possibly twice
        Scheduler.update_from_output   `accept` of sampled tokens up to a stop token; `only_end_is_left` if the
                                       sequence ends by its length
        preemption                     no call: recomputed tokens are not accepted again
        end, failure, abort            no call

    If a method raises `BrokenGrammarError`, only this request ends, and its grammar is blamed. Any other exception
    counts as a fault of the engine. `MaskPostponedError` from `fill_masks` preempts the sequence.
    """

    @property
    def expected_s(self) -> float:
        """Seconds that the next mask is expected to take; 0.0 for a fast grammar. The only value that depends on a
        clock."""
        ...

    def fill_masks(self, drafts: Tokens[int], into: "np.ndarray") -> int | None:
        """Write the masks of the next token and of the token after each draft, uint32 [1 + drafts, ceil(vocab / 32)].

        Bit v % 32 of word v // 32 is set if id v may come next. End-of-sequence ids are set if the grammar may end.
        After a draft that cannot be accepted, every id is allowed. Every word is written and no other state changes, so
        the method may be called again for the same token.

        Return the number of drafts that may be accepted before only the end is left, or None if more tokens may follow.
        If it is 0, the sequence ends now without an end-of-sequence token, regardless of `min_tokens`.
        """

    def accept(self, token_ids: Tokens[int]) -> bool:
        """Advance by `token_ids`. Return True if only the end is known to be left; after False, `fill_masks` may still
        find that. Only the last id may complete the grammar."""

    def only_end_is_left(self) -> bool:
        """Return whether `fill_masks` would return 0 for the next token."""


class RowState(Protocol):
    """State of running sequences that changes with every token, indexed by row; part of `DecodeState`."""

    num_computed: "np.ndarray"  # int64 [rows]
    last_token_s: "np.ndarray"  # float64 [rows]; nan: no token yet
    num_recent: "np.ndarray"  # int64 [rows]; tokens that `settle` has not yet appended to the sequence's list

    def settle(self, row: int) -> None: ...


class Sequence:
    """One request while it waits and runs.

    `token_ids` are all tokens known so far. `num_computed_tokens` counts the leading tokens whose keys and values exist
    when all steps scheduled so far have run; the last of these tokens is unknown while the step that samples it runs.
    Drafts count as computed until the result shows how many were accepted.

    While the sequence runs, `decode_state` keeps the values that change with every token; `DecodeState.refresh` updates
    the values derived from other attributes. `timeline` records the history of the request.
    """

    __slots__ = (
        "_last_token_s",
        "_num_computed_tokens",
        "_token_ids",
        "adapter",
        "awaited_checkpoint",
        "block_hashes",
        "block_ids",
        "checkpoints_at",
        "decode_state",
        "decodes_individually",
        "draft_state",
        "final_len",
        "grammar_matcher",
        "has_searched_files",
        "inspects_each_token",
        "key",
        "num_cached_blocks",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_returned_vectors",
        "num_scored_tokens",
        "num_to_compute",
        "pooling",
        "request",
        "request_id",
        "rolling_checkpoint",
        "row",
        "samples",
        "sampling_state",
        "shortage",
        "slots",
        "status",
        "stop_ids",
        "tables",
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
        tables: tuple[BlockTable, ...] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Take the request, its adapter, and its empty block tables, `SequenceMemory.new_tables`; None: the table of
        one group."""
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.adapter = adapter  # it is in a slot while the sequence runs; None: it has none
        self.pooling = request.pooling
        self.samples = params.max_tokens > 0  # False if the request only scores the prompt
        self.key = key  # order of service: the smallest key runs first and is preempted last
        self._token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self._token_ids)
        # Upper limit of the sequence's length: prompt tokens plus generated tokens.
        self.final_len = min(self.num_prompt_tokens + params.max_tokens, max_len)
        # Every token is computed except the last generated token, which predicts nothing.
        self.num_to_compute = max(self.num_prompt_tokens, self.final_len - 1)
        self.decode_state: RowState | None = None  # None while the sequence does not run
        self._num_computed_tokens = 0
        self.decodes_individually = not self.samples  # its decode steps are scheduled as `ScheduledTokens`
        # True if each of its tokens needs more work than appending it.
        self.inspects_each_token = grammar_matcher is not None
        self.tables = (BlockTable(),) if tables is None else tables  # one for each group of pages
        self.block_ids = self.tables[0].block_ids  # the shortest table: all have blocks for its tokens
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks, as far as they were needed
        self.num_cached_blocks = 0  # leading columns that were offered to the prefix cache, in all groups
        self.slots: HeldSlots | None = None  # of recurrent state; None while the sequence does not run
        # Checkpoints that its prompt will leave, ascending: number of tokens -> hash of the last block of them.
        self.checkpoints_at: dict[int, bytes] = {}
        self.awaited_checkpoint: bytes | None = None  # hash of a checkpoint that a running sequence was to leave
        self.rolling_checkpoint: bytes | None = None  # hash of the last checkpoint of its decodes
        self.shortage: Shortage | None = None  # most recent failed allocation of blocks
        self.has_searched_files = False  # whether KV files were searched for its prefix since it last began to wait
        self.row = -1  # index into the engine's tables; stable while the sequence runs
        self.status = Status.WAITING
        self.stop_ids = frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids)
        self.grammar_matcher = grammar_matcher
        self.sampling_state: object | None = None  # owned by the input batch; kept after a preemption
        self.draft_state: DraftState | None = None  # None: nothing was drafted for it
        self.num_scored_tokens = 0  # prompt tokens whose logprobs were sent; a preemption does not reset it
        self.num_returned_vectors = 0  # leading tokens whose vectors were returned; a preemption does not reset it
        self.num_preemptions = 0
        self.num_passed = 0  # sequences that were admitted before this sequence since it last began to wait
        self.timeline = RequestTimeline(self.request_id, self.num_prompt_tokens, arrival_s, request.adapter)
        self._last_token_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens known so far; always the same list. The getter appends tokens of decodes that are still
        pending."""
        state = self.decode_state
        if state is not None and state.num_recent[self.row]:
            state.settle(self.row)
        return self._token_ids

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed by the steps scheduled so far; the last of these steps may still be running."""
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
    def masking_param(self) -> str | None:
        """Name of the request field that may ban every token; the strictest if there are several."""
        params = self.request.params
        if params.grammar is not None:
            return params.grammar.param
        if params.allowed_token_ids is not None:
            return "allowed_token_ids"
        return "bad_words" if params.bad_words else "logit_bias" if params.logit_bias else None

    @property
    def returns_token_vectors(self) -> bool:
        """True if the hidden state of each token is returned."""
        return self.pooling is not None and self.pooling.kind == "token"

    @property
    def num_skippable_tokens(self) -> int:
        """Number of leading tokens that need not run if their KV is cached. They precede the first token that must
        still be scored or whose hidden state must still be returned."""
        params = self.request.params
        if self.pooling is not None and self.pooling.kind in ("mean", "cls", "token"):
            is_returned = self.pooling.kind == "cls" and self.num_returned_vectors
            return len(self.token_ids) if is_returned else self.num_returned_vectors
        if params.prompt_logprobs is None or self.num_scored_tokens >= self.num_prompt_tokens - 1:
            return len(self.token_ids)
        return self.num_scored_tokens

    def tokens_to_score(self, start: int, num_tokens: int) -> tuple[int, int]:
        """Return (first position, count) of the prompt tokens to score when `num_tokens` tokens from `start` on are
        computed.

        The prompt's last token is excluded because it predicts a sampled token.
        """
        if self.request.params.prompt_logprobs is None:
            return 0, 0
        first = max(start, self.num_scored_tokens)
        return first, max(0, min(start + num_tokens, self.num_prompt_tokens - 1) - first)


NOT_KNOWN = -1  # placeholder id of a token that the previous step samples

Scores = ScoredTokens | tuple[()]  # scores of the prompt tokens that one step scored


@dataclass(slots=True)
class ScheduledTokens:
    """Tokens of one sequence: `token_ids[start : start + num_tokens]`, or the token that the previous step samples.

    Its rows of logits are, in this order: `num_scored` prompt tokens from position `score_from` on, each predicting its
    successor, then one row for the next token if `wants_logits`. If `drafts` follow the newest token, they are its last
    tokens, and each adds a row for the token after the draft.
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
        return self.num_scored + self.wants_logits + len(self.drafts)


class StateSave(NamedTuple):
    """Recurrent state that a step saves as a checkpoint."""

    index: int  # of the sequence in the step
    num_tokens: int  # number of the sequence's tokens in the step after which the state is saved
    slot: int
    seq: Sequence
    num_blocks: int  # leading blocks of the sequence whose tokens lead to this state
    is_rolling: bool  # True: the next checkpoint of a decode of this sequence may replace it


class StepStates(NamedTuple):
    """Slots of recurrent state of a step with S sequences."""

    reads: np.ndarray  # int32 [S]; state before the step
    writes: np.ndarray  # int32 [S]; state after the step
    saves: list[StateSave]  # in the order of `index`, then of `num_tokens`

    def fields(self) -> dict[str, np.ndarray]:
        """Return the fields of `StepMetadata`."""
        saves = np.array([save[:3] for save in self.saves], np.int32).reshape(-1, 3)
        return {"state_reads": self.reads, "state_writes": self.writes, "state_saves": saves}


class Decodes(NamedTuple):
    """Newest tokens of D sequences, as arrays. Each has one row of logits, for the token after it."""

    rows: np.ndarray  # int64 [D]; indices into the engine's tables
    positions: np.ndarray  # int64 [D]
    token_ids: np.ndarray  # int32 [D]; NOT_KNOWN if the previous step samples the token
    num_released: int  # number of released rows when the step was scheduled; detects rows that were reused since
    seqs: list[Sequence | None]  # current sequences by row of the engine's tables

    def items(self) -> list["ScheduledTokens"]:
        """Return the decodes as objects. They are valid only until the next sequence gets a row."""
        pairs = zip(self.rows.tolist(), self.positions.tolist(), strict=True)
        return [ScheduledTokens(seq, start, 1, True) for row, start in pairs if (seq := self.seqs[row]) is not None]


_NO_ROWS = np.empty(0, np.int64)
NO_DECODES = Decodes(_NO_ROWS, _NO_ROWS, np.empty(0, np.int32), 0, [])


@dataclass(slots=True)
class SchedulerOutput:
    """Scheduling decision for one step: first `decodes`, then the other `scheduled` tokens."""

    step_id: int
    scheduled: list[ScheduledTokens]
    new_blocks: list[TableEntry] = field(default_factory=list)  # (memory group, row, column of its table, block id)
    new_rows: list[Sequence] = field(default_factory=list)  # sequences that got their row in this step
    num_preempted: int = 0
    num_decodes: int = 0  # running sequences that get one token
    num_drafts: int = 0  # drafted tokens after the decoded tokens
    num_prompt_tokens: int = 0  # tokens of all other sequences
    num_token_vectors: int = 0  # prompt tokens whose hidden states are returned
    decodes: Decodes = NO_DECODES
    kv_copies: Copies | None = None  # copies that precede all other work of the step
    adapter_commands: list[AdapterCommand] | None = None  # commands for LoRA adapters, which precede the step
    has_adapters: bool = False  # whether a running sequence has an adapter
    states: StepStates | None = None  # None: the model has no recurrent layers
    is_ahead: bool = False  # True if scheduled while the previous step was in flight

    @property
    def num_seqs(self) -> int:
        return len(self.decodes.rows) + len(self.scheduled)

    def items(self) -> list[ScheduledTokens]:
        """Return all tokens of the step as objects, in order. They are valid only until the next sequence gets a
        row."""
        return self.decodes.items() + self.scheduled

    def with_rows(self) -> Iterator[tuple[ScheduledTokens, int, int]]:
        """Yield each item of `scheduled` with its first row of logits and the row after its last."""
        first = len(self.decodes.rows)
        for item in self.scheduled:
            end = first + item.num_rows
            yield item, first, end
            first = end


class ModelRunnerOutput:
    """Output of the ranks as arrays, and as plain lists for reading single values, which is slow in numpy.

    It has one entry per row of logits: first the `Decodes`, then the `ScheduledTokens`, in order.
    """

    def __init__(self, step_output: StepOutput) -> None:
        self.step_output = step_output
        finite = step_output.finite  # uint8 [L]
        self.all_finite = finite.tobytes().count(FINITE) == len(finite)

    @cached_property
    def is_finite(self) -> np.ndarray:
        """Whether all logits of each row are finite, bool [L]."""
        return self.step_output.finite == FINITE

    def are_finite(self, first: int, end: int) -> bool:
        """Return whether all rows from `first` to `end` (exclusive) are finite."""
        return self.all_finite or bool(self.is_finite[first:end].all())

    @cached_property
    def token_ids(self) -> list[int]:
        return self.step_output.token_ids.tolist()

    @cached_property
    def finite(self) -> list[int]:
        """State of each row: FINITE, NONFINITE or ALL_BANNED."""
        return self.step_output.finite.tolist()

    def pooled(self) -> Iterator[array | None]:
        """Yield the float32 values of each pooled sequence in order, or None if they are not finite."""
        start = 0
        for length in self.step_output.pooled_lens.tolist():
            if length == NOT_POOLED:
                yield None
            else:
                yield array("f", self.step_output.pooled[start : start + length].tobytes())
                start += length

    def num_accepted(self, index: int, row: int) -> int:
        """Return the number of accepted drafts of the step's sequence at `index`, whose first row of logits is
        `row`. They stop before a draft that no token can follow: that draft is left to the next step, in which it comes
        first."""
        assert self.step_output.num_accepted is not None
        count = int(self.step_output.num_accepted[index])
        states = self.is_finite[row + 1 : row + 1 + count]
        return count if states.all() else int(states.argmin())

    def scored(self, rows: slice | np.ndarray, num_top: int) -> ScoredTokens:
        """Return the tokens scored or sampled in `rows` of logits, with `num_top` alternatives each."""
        output = self.step_output
        assert output.logprobs is not None and output.ranks is not None
        assert output.top_ids is not None and output.top_logprobs is not None
        ints = (output.token_ids[rows], output.ranks[rows], output.top_ids[rows, :num_top])
        floats = (output.logprobs[rows], output.top_logprobs[rows, :num_top])
        token_ids, ranks, top_ids = (array("i", column.tobytes()) for column in ints)
        logprobs, top_logprobs = (array("f", column.tobytes()) for column in floats)
        return ScoredTokens(num_top, token_ids, ranks, logprobs, top_ids, top_logprobs)
