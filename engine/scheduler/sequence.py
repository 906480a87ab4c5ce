"""The state of one request from its arrival to its end. Private to the engine and mutable.

Knows token ids and block ids. Does not know policy (`scheduler.py`), free blocks (`kv_cache_manager.py`) or arrays.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from engine.sampling_params import follows_tokens
from engine.types import Request

if TYPE_CHECKING:
    import numpy as np


class Status(Enum):
    """Where a sequence stands. FINISHED is final: the answer to a step still in flight for it is ignored."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class GrammarMatcherProtocol(Protocol):
    """How far one sequence has come in its grammar. The same calls give the same answers: no clock, no randomness.

    It is made before `Scheduler.add` and lives as long as its sequence:

        GrammarBitmask.fill            `fill_mask` in each step that samples a token, possibly twice, and possibly in
                                       another thread while the loop waits for the step
        Scheduler.update_from_output   `accept` once per sampled token, unless it is a stop token
        preemption                     no call: recomputed tokens are not accepted again
        end, failure, abort            no call

    An exception from either method ends that one request, by the engine's fault.
    """

    def fill_mask(self, into: "np.ndarray") -> None:
        """Write the mask of the next token into `into`, uint32 [ceil(vocab / 32)], every word of it.

        Bit v % 32 of word v // 32: id v may come next. End-of-sequence ids are set where the grammar may end.
        Changes nothing else: it may be called again for the same token.
        """

    def accept(self, token_ids: Tokens[int]) -> bool:
        """Move on by `token_ids`. True when the grammar is complete and nothing may follow: the sequence ends there,
        whatever `min_tokens` is, without an end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why the KV cache manager refused blocks to a sequence, so that it need not search again while this holds."""

    floor: int  # with the reserve added: so many blocks must have been released, ever, before it can succeed
    awaited: bytes | None  # or else the block with this hash must be cached


class Sequence:
    """One request while it waits and runs.

    `token_ids` are all tokens known so far. Keys and values of the first `num_computed_tokens` tokens exist when all
    steps scheduled so far have run; the last of these tokens is not known while the step that samples it runs.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_ids",
        "final_len",
        "first_scheduled_s",
        "first_token_s",
        "follows_tokens",
        "grammar_matcher",
        "key",
        "last_token_s",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_freed_blocks",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_to_compute",
        "request",
        "request_id",
        "row",
        "samples",
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
        grammar_matcher: GrammarMatcherProtocol | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.samples = params.max_tokens > 0  # False when only the prompt is to be scored
        self.key = key  # order of service: the smallest runs first and is preempted last
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        # So many tokens, prompt and generated ones together, end it at the latest.
        self.final_len = min(self.num_prompt_tokens + params.max_tokens, max_len)
        # Every token is computed but the last one generated, which predicts nothing.
        self.num_to_compute = max(self.num_prompt_tokens, self.final_len - 1)
        self.follows_tokens = follows_tokens(params)  # whether a row needs the token before it to be known
        self.num_computed_tokens = 0  # by the steps that are scheduled, the last of which may still run
        self.block_ids: list[int] = []
        self.num_freed_blocks = 0  # leading entries of `block_ids` that are the null block: outside the sliding window
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks, as far as they were needed
        self.num_cached_blocks = 0  # leading blocks that were offered to the prefix cache
        self.shortage: Shortage | None = None  # the last refusal of blocks
        self.row = -1  # of the engine's tables; stable while the sequence runs
        self.status = Status.WAITING
        self.stop_ids = frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids)
        self.grammar_matcher = grammar_matcher
        self.sampling_state: object | None = None  # owned by the input batch; kept over a preemption
        self.num_scored_tokens = 0  # prompt tokens whose logprobs were sent; a preemption does not reset it
        self.num_cached_tokens = 0  # of the prompt, when it first ran
        self.num_preemptions = 0
        self.num_passed = 0  # sequences that were admitted before this one, since it last began to wait
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

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
    def num_skippable_tokens(self) -> int:
        """How many leading tokens need not run when their KV is cached: all but those still to be scored."""
        params = self.request.params
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
