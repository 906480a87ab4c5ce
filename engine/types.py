"""Requests to the engine and its events: ints and floats in tuples and arrays, no text and no tensors.

These are the only objects that cross from the server to the engine and back. The server checks sampling parameters, the
engine reads them.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from typing import NamedTuple, overload

from oarlock.workers.config import GroupInfo
from oarlock.workers.sampling_parameters import PENALTIES, ScalarParams

_penalties, _NO_PENALTIES = attrgetter(*(row.name for row in PENALTIES)), tuple(row.off for row in PENALTIES)
BAN, FORCE = -100.0, 100.0  # values of `logit_bias`; BAN: the id is never chosen; FORCE: only forced ids are chosen


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole response must match."""

    kind: str  # json_schema | regex | lark | ebnf | choice | json_object
    text: str  # the schema or choices as JSON, the expression, or the grammar; empty for json_object
    param: str = "structured_outputs"  # field of the request to blame if it does not compile


@dataclass(frozen=True, slots=True)
class SamplingParams(ScalarParams):
    """Parameters that choose tokens; single numbers are fields of `ScalarParams`.

    The server checks their ranges, the engine checks ids against the vocabulary. top-p is above 0 and top-k not below:
    values that mean greedy sampling in the API become temperature 0 here.
    """

    max_tokens: int = 16  # most tokens to generate; the context may end it earlier. 0: only score the prompt
    seed: int = 0  # always drawn by the server: nothing below it is random
    min_tokens: int = 0  # stop tokens are banned until this many are generated
    eos_token_ids: tuple[int, ...] = ()  # empty if the client ignores them
    stop_token_ids: tuple[int, ...] = ()  # requested by the client
    logprobs: int | None = None  # None: none; k: the sampled token's and the k best
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, value added to its logit), including BAN and FORCE
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    grammar: Grammar | None = None


def penalises(params: SamplingParams) -> bool:
    return _penalties(params) != _NO_PENALTIES


def banned_always(params: SamplingParams) -> list[int]:
    """Return the ids that no step of the request may choose: bans of `logit_bias`, and bad words of a single token."""
    ids = [token for token, value in params.logit_bias if value <= BAN]
    return ids + [word[0] for word in params.bad_words if len(word) == 1]


# Hidden states are the output of the model's last layer, after the final norm. Order as in `oarlock.workers.protocol`.
KINDS = (
    "last",  # hidden state of the last token
    "mean",  # the mean over all tokens
    "cls",  # hidden state of the first token
    "token",  # hidden states of every token
    "logits",  # no hidden states, but the logits of `token_ids` after the last token, before any softmax
    "labels",  # no hidden states, but the output of an encoder's classification head, before any final function
)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Vectors or logits to return for one sequence: float32, not normalised."""

    kind: str  # element of KINDS
    token_ids: tuple[int, ...] = ()  # only with "logits": the ids whose logits are returned, in this order
    second_text: int = 0  # encoders: index of the second text in the prompt; 0: there is only one text


MIN_PRIORITY, MAX_PRIORITY = -10, 10


class FinishReason(StrEnum):
    """Reason why a request ended. Only its terminal event has one."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORT = "abort"  # the client left
    ERROR = "error"  # the request failed; `TokenEvent.error` has the reason


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` choices are `n` requests that share a prompt."""

    request_id: int  # unique while it lives; drawn by the client
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0  # MIN_PRIORITY to MAX_PRIORITY; lower runs earlier
    cache_salt: bytes = b""  # prefixes are shared only between equal salts
    client: str = ""  # label of the client's API key; its share of the engine is used
    is_admitted: bool = False  # it was accepted before, so a full queue must not refuse it
    is_low_priority: bool = False  # no user waits for its response; all other requests run first, at any `priority`
    # Set if vectors are wanted instead of tokens: the request ends with `FinishReason.STOP` when its prompt is
    # computed. Its `params` are POOLS.
    pooling: PoolingParams | None = None
    adapter: str | None = None  # name of a LoRA adapter; the engine resolves it when the request arrives


POOLS = SamplingParams(max_tokens=0)


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities from the raw distribution, for one position."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class ScoredTokens(Sequence[TokenLogprobs]):
    """n consecutive prompt tokens with k alternatives each, as columns. An entry is made when it is accessed.

    As objects, the scores of a long prompt would take many times the memory and much longer to make. Columns are sliced
    and sent as bytes.
    """

    num_top: int  # k
    token_ids: array  # int32 [n]
    ranks: array  # int32 [n]
    logprobs: array  # float32 [n]
    top_ids: array  # int32 [n * k]
    top_logprobs: array  # float32 [n * k]

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> "ScoredTokens": ...
    def __getitem__(self, index: int | slice) -> "TokenLogprobs | ScoredTokens":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "only slices with step 1"
            one, top = slice(start, stop), slice(start * self.num_top, stop * self.num_top)
            columns = self.token_ids[one], self.ranks[one], self.logprobs[one]
            return ScoredTokens(self.num_top, *columns, self.top_ids[top], self.top_logprobs[top])
        start = range(len(self))[index] * self.num_top
        end = start + self.num_top
        top = tuple(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))
        return TokenLogprobs(self.token_ids[index], self.logprobs[index], self.ranks[index], top)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return (TokenLogprobs(*row) for row in self.rows())

    def rows(self, *, with_top: bool = True) -> Iterator[tuple[int, float, int, tuple[tuple[int, float], ...]]]:
        """Yield id, logprob, rank and alternatives of each entry; faster than making entries."""
        top: Iterator[tuple[tuple[int, float], ...]] = repeat(())
        if with_top and self.num_top:
            pairs = zip(self.top_ids, self.top_logprobs, strict=True)
            top = (tuple(islice(pairs, self.num_top)) for _ in self.token_ids)
        return zip(self.token_ids, self.logprobs, self.ranks, top, strict=False)


class SampledTokens(Sequence[TokenLogprobs]):
    """Consecutive entries of a step's `ScoredTokens`, with `num_top` alternatives each. An entry is made when accessed.

    Equal to any sequence with equal entries.
    """

    __slots__ = ("count", "first", "num_top", "table")
    __hash__ = None

    def __init__(self, table: ScoredTokens, first: int, count: int, num_top: int) -> None:
        self.table, self.first, self.count, self.num_top = table, first, count, num_top

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[TokenLogprobs, ...]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | tuple[TokenLogprobs, ...]:
        if isinstance(index, slice):
            return tuple(self[entry] for entry in range(self.count)[index])
        table, row = self.table, self.first + range(self.count)[index]
        start = row * table.num_top
        end = start + self.num_top
        top = tuple(zip(table.top_ids[start:end], table.top_logprobs[start:end], strict=True))
        return TokenLogprobs(table.token_ids[row], table.logprobs[row], table.ranks[row], top)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(self.__getitem__, range(self.count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


@dataclass(slots=True)
class TokenEvent:
    """Result of one step for one request. Only the last event of a request has a `finish_reason`.

    Not changed once it is made; not frozen, because frozen instances take much longer to make.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()  # one per token id, if requested
    # Scores of prompt tokens from the second one on: in order, each once, in events up to the event of the first
    # generated token.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it, the last of token_ids
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # text for FinishReason.ERROR
    error_param: str | None = None  # the field of the request that is at fault; None: the engine is at fault
    error_code: str | None = None  # name of the part that is not available: the same request may succeed later
    # Concatenated vectors, or logits: float32, in an event of each step that computed any.
    pooled: Sequence[float] = ()


@dataclass(slots=True)
class TokenEvents:
    """Results of one step for all requests: events of one token and its logprobs as columns, all others as objects.

    Most events have only a token; as objects they would cost more than the rest of the step. A request's events in
    columns precede its others. Iteration makes an object of each.
    """

    request_ids: array = field(default_factory=partial(array, "q"))  # int64 [n]
    token_ids: array = field(default_factory=partial(array, "i"))  # int32 [n]
    num_cached_tokens: array = field(default_factory=partial(array, "i"))  # int32 [n]
    others: list[TokenEvent] = field(default_factory=list)
    num_top: array = field(default_factory=partial(array, "i"))  # int32 [n]; -1: no logprobs. Empty: no token has any
    logprobs: ScoredTokens | None = None  # scores of the tokens that have some, in order

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[TokenEvent]:
        first, table, num_top = 0, self.logprobs, self.num_top or repeat(-1)
        for request_id, token, num_cached, top in zip(
            self.request_ids, self.token_ids, self.num_cached_tokens, num_top, strict=False
        ):
            scores: Sequence[TokenLogprobs] = ()
            if table is not None and top >= 0:
                scores, first = SampledTokens(table, first, 1, top), first + 1
            yield TokenEvent(request_id, (token,), scores, (), None, None, num_cached)
        yield from self.others


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """State of a LoRA adapter, listed once for each name."""

    name: str
    digest: str  # hexadecimal, of its settings and weights
    directory: str
    state: str  # on_disk | loading | ready: in host memory
    slot: int  # 0: it is in no slot
    num_requests: int  # open requests


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about the running engine, for the server."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    device: str
    dtype: str
    attention_backend: str
    architecture: str
    num_parameters: int
    weight_bytes_per_rank: int
    kv_bytes_per_token_per_rank: int
    enable_prefix_caching: bool
    load_seconds: float
    max_waiting_requests: int
    max_waiting_tokens: int
    batch_invariant: bool = False  # a request's results do not depend on its batch; tested at the start
    batch_invariant_reason: str = "it was not tested"
    rank_invariant: bool = False  # a request's bits do not depend on the number of ranks; tested at the start
    rank_invariant_reason: str = "it was not tested"
    rank_pids: tuple[int, ...] = field(default=())
    numbers_digest: str = ""  # changes with everything that affects values
    quantization: str = "none"  # quantization of the weights, as a short text
    active_parameters: int | None = None  # parameters used to compute one token; None: all
    # activation quantization of the matmuls, as a short text; None: activations are not quantized
    input_rounding: str | None = None
    kv_cache_dtype: str = "auto"  # dtype of stored keys and values: the model's dtype, int8 or fp8
    step_timeout_s: float = 120.0  # a rank whose step takes longer counts as hung
    pipeline_parallel_size: int = 1  # stages, each of `tensor_parallel_size` ranks
    nnodes: int = 1  # hosts
    data_parallel_size: int = 1  # replicas; all other values are for one replica
    hidden_size: int = 0  # size of the vectors that requests may ask for
    text_part_of: str | None = None  # class of the multimodal model whose text part is served; None: a text model
    served_by: str = "oarlock"  # whose code computes the model: oarlock | transformers | checkpoint
    is_replicated: bool = False  # each of several ranks holds the weights of all layers
    max_silence_s: float = math.inf  # the longest time without a frame from a working engine
    groups: tuple[GroupInfo, ...] = ()  # memory groups of the model; (): one group of all blocks
    max_loras: int = 0  # LoRA adapters in one step; 0: none are served
    max_lora_rank: int = 0
    adapter_slot_bytes: int = 0  # device memory of each slot for a LoRA adapter on a rank
