"""A checked request becomes engine requests: prompts to ids, lengths and ids checked, one choice each.

Here, and nowhere else, randomness enters the house: a choice without a seed gets one drawn. Knows the engine's door and
its limits; knows nothing of HTTP, JSON, sockets, or of conversations (`chat_service` prepares those).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.errors import ContextLengthError, RequestError
from engine.sampling_params import Grammar, SamplingParams
from engine.types import Request
from server.llm.generation import Engine, Generation
from server.llm.generation_config import GenerationConfig
from server.llm.output_processor import Choice, OutputOptions
from server.llm.resolve import bad_word_ids, check_ids, sampling_params
from server.llm.stop_strings import StopStrings
from server.llm.structured_output import constraint_of
from server.llm.submissions import Submissions
from server.protocol.completion import CompletionRequest
from server.protocol.sampling import SamplingFields
from server.tokenizer.tokenizer import Tokenizer, TooManyTokensError

_WHOLE_CONTEXT = -1
MAX_SCORES = 8_000_000  # log-probabilities of prompts in one answer, kept until it is complete: 64 MB
_MANY_IDS = 1000  # whose check is work that others should not wait for a thousand times


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """The choices of one request, ready to run."""

    choices: list[Choice]
    num_prompts: int
    timeout_s: float | None = None
    spent_s: float = 0.0  # of it, on the plan itself


class AsyncLLM:
    """Plans generations, starts them, and knows those that are open."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        generation_config: GenerationConfig | None = None,
        *,
        strict_max_tokens: bool = False,
    ) -> None:
        """`strict_max_tokens`: a token limit beyond the context is refused, not cut."""
        self.engine = engine
        self._strict_max_tokens = strict_max_tokens
        self.tokenizer = tokenizer
        self.open: set[Generation] = set()
        self.on_finish: list[Callable[[Generation], None]] = []
        info = engine.info
        self.submissions = Submissions(info.max_num_seqs, info.max_waiting_requests, info.max_waiting_tokens)
        # One request can never hold more than the whole pool; block 0 is not handed out.
        self.max_len = min(info.max_model_len, (info.num_blocks - 1) * info.block_size)
        self.generation_config = generation_config or GenerationConfig()
        ends = dict.fromkeys((*self.generation_config.eos_token_ids, *tokenizer.eos_token_ids))
        self.eos_token_ids = tuple(token_id for token_id in ends if 0 <= token_id < info.vocab_size)

    async def plan_completion(self, request: CompletionRequest) -> ProcessedRequest:
        """The choices of a completion, prompt by prompt."""
        prompts = [await self._prompt_ids(prompt, request.max_tokens or 0, request) for prompt in request.prompts]
        echoes = None
        if request.echo:
            echoes = [await self._echo(*pair, request) for pair in zip(request.prompts, prompts, strict=True)]
        # Ranking needs the probability of every token, shown or not.
        needs_scores = request.num_generated > (request.n or 1)
        logprobs = 0 if request.logprobs is None and needs_scores else request.logprobs
        grammar = constraint_of(request)
        return await self.plan(
            request, prompts, request.max_tokens or 0, logprobs=logprobs, echoes=echoes, grammar=grammar
        )

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, stops: Sequence[str] = (), ignore_eos: bool = False
    ) -> Generation:
        """One choice with engine parameters as they are, but for the end tokens and the room: the offline door's.

        No full queue refuses it: the caller bounds how many there are at a time.
        """
        prompt_ids = await self._prompt_ids(prompt if isinstance(prompt, str) else list(prompt), params.max_tokens)
        self.check_length(len(prompt_ids), params.max_tokens)
        room = min(params.max_tokens, self.max_len - len(prompt_ids))
        eos = () if ignore_eos else params.eos_token_ids or self.eos_token_ids
        given = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room), eos_token_ids=eos)
        request = Request(self.engine.new_request_id(), prompt_ids, given, has_place=True)
        return self.start(ProcessedRequest([Choice(0, request, self.tokenizer, StopStrings(stops))], 1))

    def fail_all(self, error: BaseException) -> None:
        """End every open generation with an error."""
        for generation in list(self.open):
            generation.fail(error)

    def abort(self, request_id: str) -> int:
        """End the open generations with this id, given as the header's or the answer's; how many those were."""
        wanted = {request_id, request_id.removeprefix("cmpl-"), request_id.removeprefix("chatcmpl-")}
        return sum(generation.abort() for generation in list(self.open) if generation.request_id in wanted)

    def abort_all(self) -> int:
        """End every open generation with what it has; how many those were."""
        return sum(generation.abort() for generation in list(self.open))

    async def plan(
        self,
        request: SamplingFields,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int | None,
        *,
        logprobs: int | None = None,
        echoes: Sequence[str] | None = None,
        grammar: Grammar | None = None,
        shown: frozenset[int] = frozenset(),
        param: str = "prompt",
    ) -> ProcessedRequest:
        """One engine request for each prompt and choice. `shown`: special ids that count as text.

        Without `max_tokens` the answer may take what the context has room for. `param` names the field that a prompt
        which does not fit came from. `echoes`: the prompts as the answers begin with them.
        """
        echo_scores = logprobs if echoes is not None else None
        scored = max((top for top in (request.prompt_logprobs, echo_scores) if top is not None), default=None)
        words, tokenizer = request.bad_words or [], self.tokenizer
        banned = await tokenizer.run(partial(bad_word_ids, words, tokenizer), sum(map(len, words))) if words else ()
        common = self._common(request, logprobs, scored, grammar, banned)
        if request.skip_special_tokens is False:
            shown = self.tokenizer.special_ids
        stops = StopStrings(request.stops)
        salt = (request.cache_salt or "").encode()
        choices: list[Choice] = []
        for index, given in enumerate(prompts):
            prompt_ids = self._fitted(given, request, max_tokens, param)
            view = OutputOptions(
                echo_text=None if echoes is None else echoes[index],
                echo_scores=echo_scores is not None,
                prompt_scores=request.prompt_logprobs is not None,
                shown=shown,
                include_stop=bool(request.include_stop_str_in_output),
            )
            room = self._room_for_answer(len(prompt_ids), request, max_tokens)
            roomy = replace(common, max_tokens=room, min_tokens=min(request.min_tokens or 0, room))
            for number in range(request.num_generated):
                params = replace(roomy, seed=_choice_seed(request.seed, number))
                asked = Request(self.engine.new_request_id(), prompt_ids, params, request.priority or 0, salt)
                choices.append(Choice(len(choices), asked, self.tokenizer, stops, view))
        if scored is not None:
            _check_scores(choices, scored, "logprobs" if request.prompt_logprobs is None else "prompt_logprobs")
        return ProcessedRequest(choices, len(prompts), request.timeout)

    def start(self, plan: ProcessedRequest) -> Generation:
        """Run it."""
        limit = (plan.timeout_s, plan.spent_s)
        generation = Generation(self.engine, plan.choices, plan.num_prompts, self._closed, self.submissions, *limit)
        self.open.add(generation)
        return generation

    def _closed(self, generation: Generation) -> None:
        self.open.discard(generation)
        for callback in self.on_finish:
            callback(generation)

    async def encode(
        self, text: str, request: SamplingFields | None, max_tokens: int | None, param: str, marks: bool = True
    ) -> list[int]:
        """The ids of a prompt's text, or those at its end that are kept. Raises `ContextLengthError`.

        What cannot fit is not tokenized to its end. `marks`: with those that the checkpoint puts around a text.
        """
        most = self._room_for_prompt(max_tokens)
        keep = None if request is None else self._kept(request, max_tokens)
        try:
            if keep is not None and keep <= most:
                return await self.tokenizer.aencode(text, marks, last=keep + 1)  # one more shows that some are cut
            return await self.tokenizer.aencode(text, marks, most=most)
        except TooManyTokensError as error:
            raise self._does_not_fit(error.at_least, "at least ", max_tokens, param) from None

    async def _prompt_ids(
        self, prompt: str | list[int], max_tokens: int, request: CompletionRequest | None = None
    ) -> tuple[int, ...]:
        """The ids of one prompt, with what the request wants around it."""
        marks = request is None or request.add_special_tokens is not False
        if request is not None and request.suffix:
            ids = await self._fill_in(prompt, request, request.suffix, marks)
        else:
            ids = await self.encode(prompt, request, max_tokens, "prompt", marks) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("The prompt is empty and this model has no token to begin with.", "prompt")
        found = tuple(ids)
        self.check_ids(found, "prompt")
        if len(found) > _MANY_IDS:  # there may be a thousand such prompts
            await asyncio.sleep(0)
        return found

    async def _fill_in(
        self, prompt: str | list[int], request: CompletionRequest, suffix: str, with_opening: bool
    ) -> list[int]:
        """Prompt and suffix around the place to fill, in the order that all families of such models use.

        What opens a text stands before the first mark, once, whether it is added here or the prompt brought it along.
        """
        marks = self.tokenizer.fim_token_ids
        if marks is None:
            message = "'suffix' needs a model with fill-in-the-middle tokens, which this one is not. Leave it out."
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

    async def _echo(self, given: str | list[int], whole: tuple[int, ...], request: CompletionRequest) -> str:
        """The prompt as text: as it was given, unless ids were, or something is cut away."""
        kept = self._fitted(whole, request, request.max_tokens or 0, "prompt")
        if isinstance(given, str) and len(whole) == len(kept):
            return given
        shown = self.tokenizer.special_ids if request.skip_special_tokens is False else frozenset[int]()
        return await self.tokenizer.run(lambda: self.tokenizer.decode(kept, shown), len(kept))

    def _fitted(
        self, ids: tuple[int, ...], request: SamplingFields, max_tokens: int | None, param: str
    ) -> tuple[int, ...]:
        """The prompt, cut only if the request says so. Raises `ContextLengthError`."""
        keep = self._kept(request, max_tokens)
        if keep is not None:
            ids = ids[-keep:]
        self.check_length(len(ids), max_tokens, param)
        return ids

    def _kept(self, request: SamplingFields, max_tokens: int | None) -> int | None:
        """How many tokens of a prompt the request wants to keep, from its end; None: all."""
        keep = request.truncate_prompt_tokens
        if keep == _WHOLE_CONTEXT:
            return max(self.max_len - (1 if max_tokens is None else max_tokens), self.max_len // 2)
        return keep

    def _room_for_answer(self, num_prompt: int, request: SamplingFields, max_tokens: int | None) -> int:
        """How many tokens are generated at most. Raises `RequestError` where limits are strict."""
        room, most = self.max_len - num_prompt, self.generation_config.max_new_tokens
        if self._strict_max_tokens and (max_tokens or 0) > room:
            raise self._too_long(str(num_prompt), f"ask for at most {room}", max_tokens, request.limit_field)
        if self._strict_max_tokens and most is not None and (max_tokens or 0) > most:
            message = f"'{request.limit_field}' is {max_tokens}, and no answer of this model may have more than {most}."
            raise RequestError(message, request.limit_field)
        return min(limit for limit in (room, most, max_tokens) if limit is not None)

    def default_params(self) -> SamplingParams:
        """What a request gets that says nothing of sampling: the offline door's default."""
        common = self._common(SamplingFields())
        most = self.generation_config.max_new_tokens
        return common if most is None else replace(common, max_tokens=most)

    def _common(
        self,
        request: SamplingFields,
        logprobs: int | None = None,
        scored: int | None = None,
        grammar: Grammar | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        vocab_size, sampling = self.engine.info.vocab_size, self.generation_config.sampling
        ends = self.eos_token_ids
        return sampling_params(request, vocab_size, ends, logprobs, scored, grammar, sampling, bad_words)

    def _room_for_prompt(self, max_tokens: int | None) -> int:
        """A large max_tokens is only a ceiling."""
        return self.max_len - (0 if max_tokens == 0 else 1)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        check_ids(ids, self.engine.info.vocab_size, param)

    def check_length(self, num_prompt: int, max_tokens: int | None, param: str = "prompt") -> None:
        """A prompt that leaves no room is refused with all the numbers."""
        if num_prompt > self._room_for_prompt(max_tokens):
            raise self._does_not_fit(num_prompt, "", max_tokens, param)

    def _does_not_fit(self, num_prompt: int, about: str, max_tokens: int | None, param: str) -> ContextLengthError:
        fix = f"remove at least {num_prompt - self._room_for_prompt(max_tokens)} tokens from the prompt"
        return self._too_long(f"{about}{num_prompt}", fix, max_tokens, param)

    def _too_long(self, num_prompt: str, fix: str, max_tokens: int | None, param: str) -> ContextLengthError:
        asks = "the answer needs at least 1" if max_tokens is None else f"max_tokens asks for {max_tokens}"
        return ContextLengthError(
            f"This model's context holds {self.max_len} tokens, prompt and answer together. The prompt has "
            f"{num_prompt} tokens and {asks}; {fix}.",
            param,
        )


def _check_scores(choices: Sequence[Choice], top: int, param: str) -> None:
    num_tokens = sum(len(choice.request.prompt_token_ids) for choice in choices)
    entries = num_tokens * (1 + top)
    if entries > MAX_SCORES:
        raise RequestError(
            f"'{param}' would make {entries} log-probabilities of {num_tokens} prompt tokens, {len(choices)} choices; "
            f"at most {MAX_SCORES} are allowed. Ask for fewer alternatives, prompts or choices.",
            param,
        )


def _choice_seed(seed: int | None, index: int) -> int:
    """The first choice keeps the seed as given; the others get streams of their own. Without one, it is drawn."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
