"""A checked request becomes engine requests, and their events become one answer of several choices.

Here, and nowhere else, randomness enters the house: a choice without a seed gets one drawn. Knows the engine's door and
its limits; knows nothing of HTTP, JSON or sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from engine.errors import ContextLengthError, EngineError, RequestError
from engine.stats import EngineStats
from engine.types import EngineInfo, Request, SamplingParams, TokenEvent
from server.choice import Choice, Delta
from server.schemas import ChatRequest, CompletionRequest, SamplingFields
from server.stops import StopSet
from server.tokenizer import Tokenizer

VERDICT_TIMEOUT_S = 5.0  # how long a stream waits for the engine's first word before its 200 goes out
_GREEDY_BELOW = 1e-5


class Engine(Protocol):
    """What the service needs of `engine.client.EngineClient`."""

    @property
    def info(self) -> EngineInfo: ...

    def new_request_id(self) -> int: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...

    async def stats(self) -> EngineStats: ...


class Generation:
    """All choices of one HTTP request, running. Closing it aborts what still runs."""

    def __init__(self, engine: Engine, choices: list[Choice], num_prompts: int, on_close: Callable[..., None]) -> None:
        self.choices = choices
        self.arrival = time.monotonic()
        self.first_token_at: float | None = None
        self.closed = False
        self.request_id = ""
        self._engine = engine
        self._per_prompt = len(choices) // num_prompts
        self._on_close = on_close
        self._queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._first: Delta | BaseException | None = None
        self._tasks = [asyncio.create_task(self._pump(choice)) for choice in choices]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices share it."""
        return sum(len(choice.request.prompt_token_ids) for choice in self.choices[:: self._per_prompt])

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(choice.num_cached_tokens for choice in self.choices[:: self._per_prompt])

    async def verdict(self) -> None:
        """Wait for the first word: a refusal is raised here, while it can still be a plain HTTP answer."""
        try:
            async with asyncio.timeout(VERDICT_TIMEOUT_S):
                first = await self._queue.get()
        except TimeoutError:
            return  # long prompts and full queues take their time; from here on errors travel in the stream
        if isinstance(first, BaseException):
            raise first
        self._first = first

    async def deltas(self) -> AsyncIterator[Delta]:
        """Every piece of every choice, as they come. Raises what ended the generation, if it was no choice's end."""
        open_choices = len(self.choices)
        try:
            while open_choices:
                item = self._first if self._first is not None else await self._queue.get()
                self._first = None
                if isinstance(item, BaseException):
                    raise item
                if self.first_token_at is None and item.num_tokens:
                    self.first_token_at = time.monotonic()
                if item.error is not None:
                    raise EngineError(item.error)
                open_choices -= item.finish_reason is not None
                yield item
        finally:
            self.close()

    def fail(self, error: BaseException) -> None:
        """End this generation with an error that its client gets to see."""
        self._queue.put_nowait(error)

    def close(self) -> None:
        """Abort what still runs. Never waits: a task that is being cancelled must be able to call it."""
        if not self.closed:
            self.closed = True
            for task in self._tasks:
                task.cancel()
            self._on_close(self)

    async def _pump(self, choice: Choice) -> None:
        try:
            if choice.request.params.max_tokens == 0 and choice.request.params.prompt_logprobs is None:
                self._queue.put_nowait(choice.echo_only())
                return
            async with aclosing(self._engine.generate(choice.request)) as events:
                async for event in events:
                    delta = choice.push(event)
                    if delta is not None:
                        self._queue.put_nowait(delta)
                    if choice.finished:
                        return
            raise EngineError("The engine's answer ended without a reason.")
        except Exception as error:  # whatever it is, it belongs to this request's client
            self._queue.put_nowait(error)


class GenerationService:
    """Starts generations and knows those that are open."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.open: set[Generation] = set()
        self.on_finish: list[Callable[[Generation], None]] = []
        info = engine.info
        # One request can never hold more than the whole pool; block 0 is not handed out.
        self.max_len = min(info.max_model_len, (info.num_blocks - 1) * info.block_size)
        self._eos = tuple(i for i in tokenizer.eos_token_ids if 0 <= i < info.vocab_size)

    async def complete(self, request: CompletionRequest) -> Generation:
        """Start the choices of a completion, prompt by prompt."""
        prompts = [await self._prompt_ids(prompt) for prompt in request.prompts]
        max_tokens = request.max_tokens or 0
        for prompt_ids in prompts:
            self._check_length(len(prompt_ids), max_tokens)
        echoes: list[str | None] = [None] * len(prompts)
        if request.echo:
            pairs = zip(request.prompts, prompts, strict=True)
            echoes = [given if isinstance(given, str) else self.tokenizer.decode(ids) for given, ids in pairs]
        scored = request.logprobs if request.echo else None
        return self._start(request, prompts, echoes, max_tokens, request.logprobs, scored)

    async def chat(self, request: ChatRequest) -> Generation:
        """Start the choices of a chat turn."""
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        for message, given in zip(messages, request.messages, strict=True):
            if message["role"] == "developer":
                message["role"] = "system"
            if given.name is not None:
                message["name"] = given.name
        prompt_ids = tuple(await self.tokenizer.arender_chat(messages))
        self._check_ids(prompt_ids, "messages")
        limit = request.token_limit
        self._check_length(len(prompt_ids), limit or 1, "messages")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._start(request, [prompt_ids], [None], limit or self.max_len, logprobs, None)

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, stops: Sequence[str] = (), ignore_eos: bool = False
    ) -> Generation:
        """One choice with engine parameters as they are, but for the end tokens and the room: the offline door's."""
        prompt_ids = await self._prompt_ids(prompt if isinstance(prompt, str) else list(prompt))
        self._check_length(len(prompt_ids), params.max_tokens)
        room = min(params.max_tokens, self.max_len - len(prompt_ids))
        eos = () if ignore_eos else params.eos_token_ids or self._eos
        given = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room), eos_token_ids=eos)
        request = Request(self.engine.new_request_id(), prompt_ids, given)
        return self._open([Choice(0, request, self.tokenizer, StopSet(stops))], 1)

    def fail_all(self, error: BaseException) -> None:
        """End every open generation with an error."""
        for generation in list(self.open):
            generation.fail(error)

    def _start(
        self,
        request: SamplingFields,
        prompts: Sequence[tuple[int, ...]],
        echoes: Sequence[str | None],
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Generation:
        self._check_stop_ids(tuple(request.stop_token_ids or ()))
        stops = StopSet(request.stops)
        seeds = [_choice_seed(request.seed, index) for index in range(request.n or 1)]
        # Dividing by next to nothing would only overflow: it means the most likely token.
        is_greedy = (request.temperature or 0.0) < _GREEDY_BELOW or request.top_p == 0
        temperature = 0.0 if is_greedy else request.temperature or 0.0
        top_k = request.top_k or 0
        choices = []
        for prompt_ids, echo in zip(prompts, echoes, strict=True):
            room = min(max_tokens, self.max_len - len(prompt_ids))
            for seed in seeds:
                params = SamplingParams(
                    max_tokens=room,
                    temperature=temperature,
                    top_p=request.top_p or 1.0,
                    top_k=top_k if 0 < top_k < self.engine.info.vocab_size else 0,
                    min_p=request.min_p or 0.0,
                    seed=secrets.randbits(63) if seed is None else seed,
                    min_tokens=min(request.min_tokens or 0, room),
                    eos_token_ids=() if request.ignore_eos else self._eos,
                    stop_token_ids=tuple(request.stop_token_ids or ()),
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                )
                engine_request = Request(self.engine.new_request_id(), prompt_ids, params)
                choices.append(Choice(len(choices), engine_request, self.tokenizer, stops, echo))
        return self._open(choices, len(prompts))

    def _open(self, choices: list[Choice], num_prompts: int) -> Generation:
        generation = Generation(self.engine, choices, num_prompts, self._closed)
        self.open.add(generation)
        return generation

    def _closed(self, generation: Generation) -> None:
        self.open.discard(generation)
        for callback in self.on_finish:
            callback(generation)

    async def _prompt_ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            ids = tuple(await self.tokenizer.aencode(prompt))
            if not ids:
                raise RequestError("The prompt is empty and this model has no token to begin with.", "prompt")
        else:
            ids = tuple(prompt)
        self._check_ids(ids, "prompt")
        return ids

    def _check_ids(self, ids: tuple[int, ...], param: str) -> None:
        vocab_size = self.engine.info.vocab_size
        if max(ids, default=0) >= vocab_size:
            raise RequestError(f"Token id {max(ids)} is outside the vocabulary: ids are below {vocab_size}.", param)

    def _check_stop_ids(self, ids: tuple[int, ...]) -> None:
        vocab_size = self.engine.info.vocab_size
        if max(ids, default=0) >= vocab_size:
            message = f"Stop token id {max(ids)} is outside the vocabulary: ids are below {vocab_size}."
            raise RequestError(message, "stop_token_ids")

    def _check_length(self, num_prompt: int, max_tokens: int, param: str = "prompt") -> None:
        """A prompt that leaves no room is refused with all the numbers; a large max_tokens is only a ceiling."""
        most = self.max_len - (1 if max_tokens else 0)
        if num_prompt > most:
            raise ContextLengthError(
                f"This model's context holds {self.max_len} tokens, prompt and answer together. The prompt has "
                f"{num_prompt} tokens and max_tokens asks for {max_tokens}; remove at least {num_prompt - most} tokens "
                f"from the prompt.",
                param,
            )


def _choice_seed(seed: int | None, index: int) -> int | None:
    """The first choice keeps the seed as given; the others get streams of their own."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
