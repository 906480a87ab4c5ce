"""Conversion of a validated request to engine requests: token ids, limits, sampling parameters, one seed per choice.

Seeds are the only randomness in the server: a choice without a seed gets one here. `constraint_of` makes one grammar of
all fields that constrain a response; the engine compiles it, and names `Grammar.param` if it refuses it. Knows nothing
of HTTP or conversations.
"""

import hashlib
import json
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from oarlock.engine.errors import ContextLengthError, RequestError
from oarlock.engine.types import Grammar, Request, SamplingParams
from oarlock.server.llm.detokenizer import StopStringMatcher, StopStrings
from oarlock.server.llm.generation import Engine
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.loop_turns import turn
from oarlock.server.llm.output_processor import ChoiceOutput, OutputOptions, StopFinders
from oarlock.server.llm.tokenizer import MOST_DECODED, Tokenizer, TooManyTokensError
from oarlock.server.schemas.generation import CompletionRequest, SamplingFields

MAX_SCORES = 8_000_000  # prompt log-probabilities in one response, kept until it is complete: 64 MB
_WHOLE_CONTEXT = -1  # a value of truncate_prompt_tokens
# Sizes of a slice of work, a few milliseconds each; other tasks run between two slices.
_IDS_AT_ONCE = 100_000
_CHOICES_AT_ONCE = 16
_LONG_PROMPT_IDS = 1000  # length from which a prompt counts as long; a request may have a thousand prompts
# Lark has `:` instead of `::=`
_EBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_.-]+[ \t]*(?:\[[^\]\n]*\][ \t]*)?::=", re.MULTILINE)
BYTES_PER_ID = 4  # bytes of a token id in an array
_BYTES_PER_CHOICE = 3000  # a waiting choice, without its prompt
_GREEDY_BELOW = 1e-5  # temperature; dividing logits by less would overflow


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """Choices of one request, ready to run."""

    choices: list[ChoiceOutput]
    num_prompts: int
    timeout_s: float | None = None
    spent_s: float = 0.0  # part of the timeout that processing has used
    ignored: tuple[str, ...] = ()  # parameters that have no effect with this model


def expected_bytes(request: SamplingFields) -> int:
    """Return an estimate of the memory for the choices of a request, before any of them is made."""
    return _BYTES_PER_CHOICE * (request.num_prompts * request.num_generated - 1)


def waiting_bytes(processed: ProcessedRequest) -> int:
    """Return an estimate of the memory that a request takes while it waits and runs, beyond its first sequence.

    The engine's queue counts only the tokens of the first sequence. This estimate covers the other prompts and choices,
    and lists as long as the vocabulary.
    """
    first, choices = processed.choices[0], processed.choices
    prompts = choices[:: len(choices) // processed.num_prompts]
    num_ids = sum(len(choice.request.prompt_token_ids) for choice in prompts[1:])
    echoed = sum(len(choice.output_options.echo_text or "") for choice in prompts)
    params = first.request.params
    num_ids += 2 * len(params.allowed_token_ids or ())  # here and in the engine
    grammar = len(params.grammar.text) if params.grammar is not None else 0
    return BYTES_PER_ID * num_ids + _BYTES_PER_CHOICE * (len(choices) - 1) + echoed + grammar


class InputProcessor:
    """Makes `ProcessedRequest`s within the limits of one engine and tokenizer."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        generation_config: GenerationConfig | None = None,
        *,
        strict_max_tokens: bool = False,
    ) -> None:
        """`strict_max_tokens`: refuse a token limit beyond the context instead of lowering it."""
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self._engine = engine
        self._strict_max_tokens = strict_max_tokens
        info = engine.info
        # One request can never use more than the whole pool; block 0 is never allocated.
        self.max_len = min(info.max_model_len, (info.num_blocks - 1) * info.block_size)
        ends = dict.fromkeys((*self.generation_config.eos_token_ids, *tokenizer.eos_token_ids))
        self.eos_token_ids = tuple(token_id for token_id in ends if 0 <= token_id < info.vocab_size)

    async def process_completion(self, request: CompletionRequest) -> ProcessedRequest:
        """Return the choices of a completion, prompt by prompt. Raises `RequestError` if the request cannot run."""
        prompts = [_kept(await self._prompt_ids(prompt, request), request.num_prompts) for prompt in request.prompts]
        echoes = None
        if request.echo:
            echoes = await self._echoes(prompts, request)
        # Ranking needs the probability of every token, shown or not.
        needs_scores = request.num_generated > (request.n or 1)
        logprobs = 0 if request.logprobs is None and needs_scores else request.logprobs
        grammar = constraint_of(request)
        return await self.process(
            request, prompts, request.max_tokens or 0, logprobs=logprobs, echoes=echoes, grammar=grammar
        )

    async def process_text(
        self,
        request: SamplingFields,
        text: str,
        max_tokens: int | None,
        *,
        logprobs: int | None,
        grammar: Grammar | None,
        shown: frozenset[int],
        param: str,
        stop_finders: StopFinders = StopStringMatcher,
    ) -> ProcessedRequest:
        """Return the choices of one rendered prompt, tokenized without special tokens around it.

        The other arguments are the same as in `process`.
        """
        ids = await self.encode(text, request, max_tokens, param, False)
        await self.check_ids(ids, param)
        return await self.process(
            request,
            [tuple(ids)],
            max_tokens,
            logprobs=logprobs,
            grammar=grammar,
            shown=shown,
            param=param,
            stop_finders=stop_finders,
        )

    async def process(
        self,
        request: SamplingFields,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        *,
        logprobs: int | None = None,
        echoes: Sequence[str] | None = None,
        grammar: Grammar | None = None,
        shown: frozenset[int] = frozenset(),
        param: str = "prompt",
        stop_finders: StopFinders = StopStringMatcher,
    ) -> ProcessedRequest:
        """Return one engine request for each prompt and choice. `shown`: special ids that count as text.

        Without `max_tokens` the output may fill the context. `param`: the field that errors name if a prompt does not
        fit. `echoes`: the prompts as the completions repeat them. Raises `RequestError` if a parameter is invalid.
        """
        echo_scores = logprobs if echoes is not None else None
        scored = max((top for top in (request.prompt_logprobs, echo_scores) if top is not None), default=None)
        words, tokenizer = request.bad_words or [], self.tokenizer
        banned = await tokenizer.run(partial(_bad_word_ids, words, tokenizer), sum(map(len, words))) if words else ()
        common = self._sampling_params(request, logprobs, scored, grammar, banned)
        if request.skip_special_tokens is False:
            shown = self.tokenizer.special_ids
        stops = StopStrings(request.stops)
        salt = (request.cache_salt or "").encode()
        choices: list[ChoiceOutput] = []
        for index, given in enumerate(prompts):
            prompt_ids = self._fitted(given, request, max_tokens, param)
            output_options = OutputOptions(
                echo_text=None if echoes is None else echoes[index],
                echo_scores=echo_scores is not None,
                prompt_scores=request.prompt_logprobs is not None,
                shown=shown,
                include_stop=bool(request.include_stop_str_in_output),
            )
            limit = self._completion_limit(len(prompt_ids), request, max_tokens)
            of_prompt = replace(common, max_tokens=limit, min_tokens=min(request.min_tokens or 0, limit))
            for number in range(request.num_generated):
                params = replace(of_prompt, seed=_choice_seed(request.seed, number))
                wanted = Request(self._engine.new_request_id(), prompt_ids, params, request.priority or 0, salt)
                choices.append(ChoiceOutput(len(choices), wanted, self.tokenizer, stops, output_options, stop_finders))
                if not len(choices) % _CHOICES_AT_ONCE:
                    await turn()
        if scored is not None:
            _check_scores(choices, scored, "logprobs" if request.prompt_logprobs is None else "prompt_logprobs")
        return ProcessedRequest(choices, len(prompts), request.timeout)

    async def encode(
        self, text: str, request: SamplingFields, max_tokens: int | None, param: str, marks: bool = True
    ) -> list[int]:
        """Return the ids of a prompt's text, or the ids to keep if it is truncated. Raises `ContextLengthError`.

        A text that cannot fit is not tokenized completely. `marks`: with the special tokens that the checkpoint adds to
        a text.
        """
        most = self._room_for_prompt(max_tokens)
        keep = self._kept(request, max_tokens)
        try:
            if keep is not None and keep <= most:
                if request.truncation_side == "right":
                    return await self._beginning(text, keep, marks, param)
                # One more id shows whether the prompt was truncated.
                return await self.tokenizer.aencode(text, marks, last=keep + 1, param=param)
            return await self.tokenizer.aencode(text, marks, most=most, param=param)
        except TooManyTokensError as error:
            raise self._does_not_fit(error.at_least, "at least ", max_tokens, param) from None

    async def _beginning(self, text: str, keep: int, marks: bool, param: str) -> list[int]:
        """Return the ids of a text; of a longer text, the opening special tokens and at least the first `keep` ids."""
        first = await self.tokenizer.aencode(text, False, first=keep + 1, param=param)
        if len(first) <= keep:
            return await self.tokenizer.aencode(text, marks, param=param)
        return [*self.tokenizer.opening, *first] if marks else first

    async def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise `RequestError` if an id is not a token of the model."""
        vocab_size = self._engine.info.vocab_size
        for start in range(0, len(ids), _IDS_AT_ONCE):
            if max(ids[start : start + _IDS_AT_ONCE]) >= vocab_size:
                _check_ids(ids, vocab_size, param)
            if len(ids) > _LONG_PROMPT_IDS:
                await turn()

    def check_length(self, num_prompt: int, max_tokens: int | None, param: str = "prompt") -> None:
        """Raise `ContextLengthError`, with all lengths, if a prompt leaves no room for a completion."""
        if num_prompt > self._room_for_prompt(max_tokens):
            raise self._does_not_fit(num_prompt, "", max_tokens, param)

    async def _prompt_ids(self, prompt: str | list[int], request: CompletionRequest) -> tuple[int, ...]:
        """Return the ids of one prompt, with suffix and special tokens as requested."""
        marks, limit = request.add_special_tokens is not False, request.max_tokens or 0
        if request.suffix:
            ids = await self._fill_in(prompt, request, request.suffix, marks)
        else:
            ids = await self.encode(prompt, request, limit, "prompt", marks) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("The prompt is empty, and this model has no token that could start one.", "prompt")
        await self.check_ids(ids, "prompt")
        return tuple(ids)

    async def _fill_in(
        self, prompt: str | list[int], request: CompletionRequest, suffix: str, with_opening: bool
    ) -> list[int]:
        """Return prompt and suffix around the gap to fill, in the order that all families of such models use.

        The opening special tokens precede the first fill-in-the-middle token, once, whether added here or part of the
        prompt.
        """
        marks = self.tokenizer.fim_token_ids
        if marks is None:
            message = "'suffix' needs a model with fill-in-the-middle tokens, and this model has none. Leave it out."
            raise RequestError(message, "suffix", "unsupported_parameter")
        before, between, after = marks
        limit = request.max_tokens or 0
        opening: list[int] = []
        if isinstance(prompt, str):
            opening = self.tokenizer.opening if with_opening else []
            prompt = await self.encode(prompt, request, limit, "prompt", False)
        if self.tokenizer.bos and prompt[:1] == self.tokenizer.bos:
            opening, prompt = opening or self.tokenizer.bos, prompt[1:]
        behind = await self.encode(suffix, request, limit, "suffix", False)
        return [*opening, before, *prompt, between, *behind, after]

    async def _echoes(self, prompts: Sequence[Sequence[int]], request: CompletionRequest) -> list[str]:
        """Return each prompt as text.

        Raises `RequestError` if the response would repeat more than `MOST_DECODED` characters.
        """
        echoes: list[str] = []
        size = 0
        for given, whole in zip(request.prompts, prompts, strict=True):
            echoes.append(await self._echo(given, whole, request))
            size += len(echoes[-1]) * request.num_generated
            if size > MOST_DECODED:
                message = (
                    f"'echo' would return more than {MOST_DECODED} characters of prompts: each prompt once "
                    "per choice. Request fewer prompts or choices, or leave 'echo' out."
                )
                raise RequestError(message, "echo")
        return echoes

    async def _echo(self, given: str | list[int], whole: Sequence[int], request: CompletionRequest) -> str:
        """Return the prompt as text: as it was given, or decoded if it was given as ids or is truncated."""
        kept = self._fitted(whole, request, request.max_tokens or 0, "prompt")
        if isinstance(given, str) and len(whole) == len(kept):
            return given
        shown = self.tokenizer.special_ids if request.skip_special_tokens is False else frozenset[int]()
        return await self.tokenizer.atext(kept, shown, "echo")

    def _fitted(self, ids: Sequence[int], request: SamplingFields, max_tokens: int | None, param: str) -> Sequence[int]:
        """Return the prompt, truncated only if the request asks for it. Raises `ContextLengthError` if too long."""
        keep = self._kept(request, max_tokens)
        if keep is not None:
            ids = ids[:keep] if request.truncation_side == "right" else ids[-keep:]
        self.check_length(len(ids), max_tokens, param)
        return ids

    def _kept(self, request: SamplingFields, max_tokens: int | None) -> int | None:
        """Return the number of prompt tokens that the request keeps; None: all."""
        keep = request.truncate_prompt_tokens
        if keep == _WHOLE_CONTEXT:
            return max(self.max_len - (1 if max_tokens is None else max_tokens), self.max_len // 2)
        return keep

    def _completion_limit(self, num_prompt: int, request: SamplingFields, max_tokens: int | None) -> int:
        """Return the maximum number of tokens to generate. Raises `RequestError` if limits are strict and exceeded."""
        room, most = self.max_len - num_prompt, self.generation_config.max_new_tokens
        if self._strict_max_tokens and (max_tokens or 0) > room:
            raise self._too_long(str(num_prompt), f"request at most {room}", max_tokens, request.limit_field)
        if self._strict_max_tokens and most is not None and (max_tokens or 0) > most:
            message = (
                f"'{request.limit_field}' is {max_tokens}, and a completion of this model may have at "
                f"most {most} tokens."
            )
            raise RequestError(message, request.limit_field)
        return min(limit for limit in (room, most, max_tokens) if limit is not None)

    def _room_for_prompt(self, max_tokens: int | None) -> int:
        """Return the maximum prompt length in tokens. A large `max_tokens` is only a ceiling and reserves no room."""
        return self.max_len - (0 if max_tokens == 0 else 1)

    def _does_not_fit(self, num_prompt: int, about: str, max_tokens: int | None, param: str) -> ContextLengthError:
        fix = f"remove at least {num_prompt - self._room_for_prompt(max_tokens)} tokens from the prompt"
        return self._too_long(f"{about}{num_prompt}", fix, max_tokens, param)

    def _too_long(self, num_prompt: str, fix: str, max_tokens: int | None, param: str) -> ContextLengthError:
        asks = "the completion needs at least 1" if max_tokens is None else f"max_tokens requests {max_tokens}"
        return ContextLengthError(
            f"This model's context holds {self.max_len} tokens, prompt and completion together. The prompt "
            f"has {num_prompt} tokens and {asks}; {fix}.",
            param,
        )

    def _sampling_params(
        self,
        request: SamplingFields,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """Return the sampling parameters that all choices share; fields without a value have the model's default.

        Seed and token limits differ between choices. `bad_words`: token ids of each. Raises `RequestError` if an id is
        invalid.
        """
        defaults, vocab_size = self.generation_config.sampling, self._engine.info.vocab_size

        scalars: dict[str, Any] = {}
        for row in SamplingParams.table():
            own = getattr(request, row.name)
            scalars[row.name] = own if row.name in request.model_fields_set else defaults.get(row.name, own)
        if scalars["temperature"] < _GREEDY_BELOW or scalars["top_p"] == 0:
            scalars["temperature"] = 0.0
        scalars["top_p"] = scalars["top_p"] or 1.0
        scalars["top_k"] = scalars["top_k"] if 0 < scalars["top_k"] < vocab_size else 0
        allowed = None
        if request.allowed_token_ids is not None:
            allowed = array("i", _checked(sorted(set(request.allowed_token_ids)), vocab_size, "allowed_token_ids"))
        return SamplingParams(
            **scalars,
            eos_token_ids=() if request.ignore_eos else self.eos_token_ids,
            stop_token_ids=_checked(request.stop_token_ids or (), vocab_size, "stop_token_ids"),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias=_biases(request.logit_bias or {}, vocab_size),
            allowed_token_ids=allowed,
            bad_words=bad_words,
            grammar=grammar,
        )


def _kept(prompt_ids: tuple[int, ...], num_prompts: int) -> Sequence[int]:
    """Return a prompt for waiting: if there are many, as an array, which takes a ninth of the memory of a tuple."""
    return prompt_ids if num_prompts == 1 else array("i", prompt_ids)


def _checked(ids: Iterable[int], vocab_size: int, param: str) -> tuple[int, ...]:
    found = tuple(ids)
    _check_ids(found, vocab_size, param)
    return found


def _check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if max(ids, default=0) >= vocab_size:
        message = (
            f"{param} contains token id {max(ids)}, which is outside the vocabulary: ids must be below {vocab_size}."
        )
        raise RequestError(message, param)


def _biases(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found = tuple(sorted((int(token), float(bias)) for token, bias in biases.items()))
    _check_ids(tuple(token for token, _ in found), vocab_size, "logit_bias")
    return found


def _bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word at the start of a text and, with a space, inside a text."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def _check_scores(choices: Sequence[ChoiceOutput], top: int, param: str) -> None:
    num_tokens = sum(len(choice.request.prompt_token_ids) for choice in choices)
    entries = num_tokens * (1 + top)
    if entries > MAX_SCORES:
        raise RequestError(
            f"'{param}' would return {entries} log-probabilities of {num_tokens} prompt tokens, "
            f"{len(choices)} choices; at most {MAX_SCORES} are allowed. Request fewer alternatives, prompts "
            "or choices.",
            param,
        )


def _choice_seed(seed: int | None, index: int) -> int:
    """Return a choice's seed: the request's for the first choice, else derived from it. Without a seed it is random."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def constraint_of(request: SamplingFields) -> Grammar | None:
    """Return the grammar that the fields of `request` ask for; equal constraints under several names count once.

    Raises `RequestError` if they differ.
    """
    found = list(_constraints(request))
    for name, grammar in found[1:]:
        first, wanted = found[0]
        if (grammar.kind, grammar.text) != (wanted.kind, wanted.text):
            message = (
                f"'{first}' and '{name}' differ, and a completion can follow only one constraint. Leave one "
                "of them out."
            )
            raise RequestError(message, grammar.param)
    return found[0][1] if found else None


def _constraints(request: SamplingFields) -> Iterator[tuple[str, Grammar]]:
    """Yield every constraint with the path of its field."""
    yield from _of_response_format(request)
    yield from _of_structured_outputs(request)
    aliases = (
        ("guided_json", request.guided_json, "json_schema"),
        ("guided_regex", request.guided_regex, "regex"),
        ("guided_choice", request.guided_choice, "choice"),
        ("guided_grammar", request.guided_grammar, "grammar"),
        ("json_schema", request.json_schema, "json_schema"),
        ("regex", request.regex, "regex"),
        ("ebnf", request.ebnf, "ebnf"),
        ("grammar", request.grammar or None, "grammar"),
    )
    for name, value, kind in aliases:
        if value is not None:
            yield name, _grammar(kind, value, name)


def _of_response_format(request: SamplingFields) -> Iterator[tuple[str, Grammar]]:
    wanted, name = request.response_format, "response_format"
    if wanted is None or wanted.type == "text":
        return
    schema = wanted.json_form
    if schema is None and wanted.type == "json_object":
        yield name, Grammar("json_object", "", name)
    else:
        yield name, _grammar("json_schema", True if schema is None else schema, name)


def _of_structured_outputs(request: SamplingFields) -> Iterator[tuple[str, Grammar]]:
    wanted, name = request.structured_outputs, "structured_outputs"
    if wanted is None:
        return
    found = [
        (f"{name}.{key}", _grammar(kind, value, name))
        for key, value, kind in (
            ("json", wanted.json_, "json_schema"),
            ("regex", wanted.regex, "regex"),
            ("choice", wanted.choice, "choice"),
            ("grammar", wanted.grammar, "grammar"),
        )
        if value is not None
    ]
    if wanted.json_object:
        found.append((f"{name}.json_object", Grammar("json_object", "", name)))
    if not found:
        message = (
            f"'{name}' contains no constraint. Give one of json, regex, choice, grammar, json_object, or leave it out."
        )
        raise RequestError(message, name)
    yield from found


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    """Return the grammar of a field. Text stays unchanged; JSON is serialized compactly in its own order."""
    if kind == "grammar":
        kind = "ebnf" if _EBNF_RULE.search(value) else "lark"
    if isinstance(value, str):
        return Grammar(kind, value, param)
    plain: Any = {} if value is True else value
    return Grammar(kind, json.dumps(plain, ensure_ascii=False, separators=(",", ":")), param)
