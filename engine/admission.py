"""What a request must satisfy before it may wait: ids inside the vocabulary, lengths inside the context.

A request that passes cannot break a step: everything that later meets a fixed-width array is checked here. Knows the
engine's limits. Does not know who else is running.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ContextLengthError, RequestError
from engine.types import Request, SamplingParams
from workers.config import WorkerInfo
from workers.protocol import MAX_BIAS_PER_ROW, MAX_LOGPROBS

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# Prompt logprobs are kept until the prompt is complete and leave in one frame.
_MAX_PROMPT_LOGPROB_ENTRIES = 2_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    vocab_size: int
    max_len: int  # prompt and generated tokens together; never more than the whole pool holds

    @staticmethod
    def of(config: EngineConfig, info: WorkerInfo) -> "Limits":
        pool_tokens = (info.num_blocks - 1) * info.block_size
        return Limits(vocab_size=info.vocab_size, max_len=min(info.max_model_len, pool_tokens))


def check(request: Request, limits: Limits) -> None:
    """Raise `RequestError` with the field, its limit and the fix unless `request` can be served to its end."""
    _check_params(request.params, limits)
    _check_prompt(request.prompt_token_ids, limits)
    _check_length(request, limits)


def _check_prompt(token_ids: tuple[int, ...], limits: Limits) -> None:
    if not token_ids:
        raise RequestError("The prompt is empty: send at least one token.", "prompt")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < limits.vocab_size)
        raise RequestError(
            f"Token id {wrong} is outside the vocabulary: ids go from 0 to {limits.vocab_size - 1}.", "prompt"
        )


def _check_length(request: Request, limits: Limits) -> None:
    length, params = len(request.prompt_token_ids), request.params
    most = limits.max_len - (params.max_tokens > 0)  # room for at least one new token when any is wanted
    if length > most:
        raise ContextLengthError(
            f"The prompt has {length} tokens, but at most {most} fit "
            f"(context {limits.max_len} tokens, prompt and completion together). Shorten the prompt."
        )
    if params.prompt_logprobs is not None:
        entries = length * (params.prompt_logprobs + 1)
        if entries > _MAX_PROMPT_LOGPROB_ENTRIES:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} for {length} prompt tokens makes {entries} entries, at most "
                f"{_MAX_PROMPT_LOGPROB_ENTRIES} are kept. Ask for fewer, or send a shorter prompt.",
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
    for name, ids in (("eos_token_ids", params.eos_token_ids), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            _in_range(name, token, 0, limits.vocab_size - 1)
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens}). Lower it.", "min_tokens"
        )
    # As many stop ids are banned at once while min_tokens holds them back.
    num_stops = len(set(params.eos_token_ids) | set(params.stop_token_ids))
    if num_stops > MAX_BIAS_PER_ROW:
        raise RequestError(f"{num_stops} stop token ids, at most {MAX_BIAS_PER_ROW} are allowed.", "stop_token_ids")
    if params.min_tokens and num_stops >= limits.vocab_size:
        raise RequestError("min_tokens would ban every token of the vocabulary. Use fewer stop ids.", "min_tokens")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, but must be between {low} and {high}.", name)
