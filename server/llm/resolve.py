"""The fields of a request as the engine's sampling parameters: defaults filled in, words tokenized, ids checked.

Knows the wire types, the tokenizer and the size of the vocabulary. Knows neither prompts nor choices: seeds and the
room for tokens differ from choice to choice and are filled in by `service`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.sampling_params import Grammar, SamplingParams
from server.protocol.sampling import SamplingFields
from server.tokenizer.tokenizer import Tokenizer

_GREEDY_BELOW = 1e-5


def sampling_params(
    request: SamplingFields,
    vocab_size: int,
    eos: tuple[int, ...],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
    defaults: Mapping[str, float],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """What all choices of the request have in common. `defaults`: fields that count where the request has none.

    `bad_words`: the request's, as `bad_word_ids` writes them. Raises `RequestError`.
    """

    def chosen(name: str) -> Any:
        own = getattr(request, name)
        return own if name in request.model_fields_set else defaults.get(name, own)

    temperature, top_p, top_k = chosen("temperature"), chosen("top_p"), chosen("top_k")
    # Dividing by next to nothing would only overflow: it means the most likely token.
    is_greedy = temperature < _GREEDY_BELOW or top_p == 0
    allowed = request.allowed_token_ids
    return SamplingParams(
        temperature=0.0 if is_greedy else temperature,
        top_p=top_p or 1.0,
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=chosen("min_p"),
        eos_token_ids=() if request.ignore_eos else eos,
        stop_token_ids=_ids(request.stop_token_ids or (), vocab_size, "stop_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=chosen("repetition_penalty"),
        logit_bias=_biases(request.logit_bias or {}, vocab_size),
        allowed_token_ids=None if allowed is None else _ids(sorted(set(allowed)), vocab_size, "allowed_token_ids"),
        bad_words=bad_words,
        grammar=grammar,
    )


def _ids(ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    found = tuple(ids)
    check_ids(found, vocab_size, param)
    return found


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `RequestError` when one of them is no token of the model."""
    if max(ids, default=0) >= vocab_size:
        message = f"{param} holds token id {max(ids)}, which is outside the vocabulary: ids are below {vocab_size}."
        raise RequestError(message, param)


def _biases(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = tuple(sorted((int(token), float(bias)) for token, bias in biases.items()))
    check_ids(tuple(token for token, _ in found), vocab_size, "logit_bias")
    return found


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and, with a space, inside one."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)
