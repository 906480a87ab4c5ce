"""Checks of a request before it is queued: ids within the vocabulary, lengths within the context, values within range.

A request that passes cannot make a step fail: every value that is later written to a fixed-width array is checked here.
Does not know other requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oarlock.engine.errors import ContextLengthError, RequestError
from oarlock.engine.types import (
    KINDS,
    MAX_PRIORITY,
    MIN_PRIORITY,
    POOLS,
    PoolingParams,
    Request,
    SamplingParams,
    banned_always,
)
from oarlock.workers.config import MAX_POOLED_IDS, WorkerInfo
from oarlock.workers.protocol import MAX_BIAS_PER_ROW, MAX_LOGPROBS

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# The arrays of a step have this many entries per row for each of stop ids held back, logit_bias and bad words.
MAX_STOP_IDS = MAX_LOGIT_BIAS = MAX_BAD_WORDS = MAX_BIAS_PER_ROW // 3
MAX_BAD_WORD_TOKENS = 256
# Prompt logprobs are sent step by step, but the server may keep them until the prompt is complete: 8 bytes an entry.
_MAX_PROMPT_LOGPROB_ENTRIES = 2_000_000
MAX_POOLED_VALUES = 1 << 24  # vector values of one request: 64 MiB


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request: vocabulary, length, vectors and labels."""

    vocab_size: int
    max_len: int  # prompt and generated tokens together; never more than the memory holds
    hidden_size: int  # values of a vector
    is_encoder: bool = False
    num_labels: int = 0  # labels of the encoder's classification head

    @staticmethod
    def of(info: WorkerInfo, max_held_tokens: int) -> "Limits":
        """Return the limits of a model. `max_held_tokens`: length of the longest sequence that its memory can hold."""
        most = min(info.max_model_len, max_held_tokens)
        return Limits(info.vocab_size, most, info.hidden_size, info.whole_texts, info.num_labels)


def check(request: Request, limits: Limits) -> None:
    """Raise `RequestError` with the field, its limit and the fix if `request` cannot be served to its end."""
    _in_range("priority", request.priority, MIN_PRIORITY, MAX_PRIORITY)
    _check_params(request.params, limits)
    _check_prompt(request.prompt_token_ids, limits)
    _check_length(request, limits)
    if request.pooling is not None:
        _check_pooling(request.pooling, request, limits)
    elif limits.is_encoder:
        raise RequestError("This model is an encoder and does not generate tokens. Request vectors instead.", "pooling")


def _check_pooling(pooling: PoolingParams, request: Request, limits: Limits) -> None:
    if pooling.kind not in KINDS:
        raise RequestError(f"pooling is {pooling.kind!r}, but must be one of {', '.join(KINDS)}.", "pooling")
    if request.params != POOLS:
        raise RequestError("A request for vectors does not sample tokens. Remove all sampling parameters.", "pooling")
    ids, num_tokens = pooling.token_ids, len(request.prompt_token_ids)
    if (pooling.kind == "logits" and limits.is_encoder) or (pooling.kind == "labels" and not limits.num_labels):
        raise RequestError(f"This model has no {pooling.kind}: use another kind of pooling.", "pooling")
    if pooling.second_text and not limits.is_encoder:
        raise RequestError("Only encoders support a second text. Remove second_text.", "second_text")
    _in_range("second_text", pooling.second_text, 0, num_tokens)
    if (pooling.kind == "logits") != bool(ids):
        raise RequestError("Pooling of kind logits requires token_ids, and other kinds must have none.", "token_ids")
    _at_most("token_ids", len(ids), MAX_POOLED_IDS, "ids")
    _check_in_vocabulary("token_ids", ids, limits)
    if pooling.kind == "token" and num_tokens * limits.hidden_size > MAX_POOLED_VALUES:
        raise RequestError(
            f"The request would return {num_tokens} vectors of {limits.hidden_size} values, but at most "
            f"{MAX_POOLED_VALUES // limits.hidden_size} vectors can be returned. Send a shorter prompt.",
            "pooling",
        )


def _check_in_vocabulary(name: str, ids: Sequence[int], limits: Limits) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"{name} has the token id {wrong}, but ids go from 0 to {limits.vocab_size - 1}. Remove it.", name
        )


def _check_prompt(token_ids: Sequence[int], limits: Limits) -> None:
    if not token_ids:
        raise RequestError("The prompt is empty: send at least one token.", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"Token id {wrong} is outside the vocabulary: ids go from 0 to {limits.vocab_size - 1}.", "prompt"
        )


def _check_length(request: Request, limits: Limits) -> None:
    length, params = len(request.prompt_token_ids), request.params
    most = limits.max_len - (params.max_tokens > 0)  # reserve one position for a new token if any is wanted
    if length > most:
        raise ContextLengthError(
            f"The prompt has {length} tokens, but at most {most} fit "
            f"(context {limits.max_len} tokens, prompt and completion together). Shorten the prompt."
        )
    if params.prompt_logprobs is not None:
        entries = length * (params.prompt_logprobs + 1)
        if entries > _MAX_PROMPT_LOGPROB_ENTRIES:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} for {length} prompt tokens needs {entries} entries, but "
                f"at most {_MAX_PROMPT_LOGPROB_ENTRIES} are allowed. Request fewer, or send a shorter prompt.",
                "prompt_logprobs",
            )


def _check_params(params: SamplingParams, limits: Limits) -> None:
    _in_range("max_tokens", params.max_tokens, 0, _INT32_MAX)
    _in_range("min_tokens", params.min_tokens, 0, _INT32_MAX)
    _in_range("top_k", params.top_k, 0, _INT32_MAX)
    _in_range("seed", params.seed, -_INT64_MAX - 1, _INT64_MAX)
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _in_range(name, value, 0, MAX_LOGPROBS)
    for name, values in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        _in_range(name, values, -2, 2)
    if not 0 < params.repetition_penalty < math.inf:
        raise RequestError(
            f"repetition_penalty is {params.repetition_penalty}, but must be above 0 and finite.", "repetition_penalty"
        )
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens}). Lower it.", "min_tokens"
        )
    _check_ids(params, limits)
    _check_not_all_banned(params, limits)


def _check_ids(params: SamplingParams, limits: Limits) -> None:
    """Check that every id is in the vocabulary, and that no list exceeds the arrays of a step."""
    for name, ids in (
        ("eos_token_ids", params.eos_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", [token for word in params.bad_words for token in word]),
    ):
        _check_in_vocabulary(name, ids, limits)
    _at_most("stop_token_ids", len({*params.eos_token_ids, *params.stop_token_ids}), MAX_STOP_IDS, "stop token ids")
    _at_most("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS, "entries")
    _at_most("bad_words", len(params.bad_words), MAX_BAD_WORDS, "token sequences")
    for token, value in params.logit_bias:
        if not -100 <= value <= 100:
            raise RequestError(f"logit_bias of id {token} is {value}, but must be between -100 and 100.", "logit_bias")
    if not all(params.bad_words):
        raise RequestError("bad_words contains an empty token sequence. Remove it.", "bad_words")
    _at_most("bad_words", max(map(len, params.bad_words), default=0), MAX_BAD_WORD_TOKENS, "tokens in one sequence")


def _check_not_all_banned(params: SamplingParams, limits: Limits) -> None:
    """Check that some id is not banned. Ids excluded by grammars or longer bad words are known only later."""
    allowed, banned = params.allowed_token_ids, set(banned_always(params))
    if params.min_tokens:
        banned.update(params.eos_token_ids, params.stop_token_ids)
    if allowed is not None and banned.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids allows no token: it is empty, or logit_bias, bad_words or min_tokens ban all its ids. "
            "Add ids to it.",
            "allowed_token_ids",
        )
    if len(banned) >= limits.vocab_size:
        name = "min_tokens" if params.min_tokens else "logit_bias"
        raise RequestError(f"{name} would ban every token of the vocabulary. Ban fewer ids.", name)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} {what}, but at most {most} are allowed. Remove some.", name)


def _in_range(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, but must be between {low} and {high}.", name)
