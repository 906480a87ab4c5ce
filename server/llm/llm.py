"""The offline interface: prompts in, texts out, no HTTP. The same engine and input processing as the server's.

    with LLM("path/to/model") as llm:
        print(llm.generate("import os", SamplingParams(max_tokens=32, temperature=0))[0].text)

Runs one event loop in a background thread. Does not know sockets, JSON or routes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from engine.client import EngineClient
from engine.errors import StartupError
from engine.sampling_params import SamplingParams
from engine.types import EngineInfo
from server.config import model_path
from server.config.options import OptionError
from server.config.settings import SERVER_ONLY, Settings, make_settings
from server.llm.async_llm import AsyncLLM
from server.llm.generation import collect
from server.llm.generation_config import GenerationConfig
from server.llm.prompt_scores import TokenScore
from server.tokenizer.tokenizer import Tokenizer

_T = TypeVar("_T")
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt became."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: str | int | None
    num_cached_tokens: int
    scores: tuple[TokenScore, ...]  # one per token, when `SamplingParams.logprobs` asks for them


class LLM:
    """A loaded model. `settings` are the server's options by name, such as `tensor_parallel_size=2`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        foreign = SERVER_ONLY & settings.keys()
        if foreign:
            raise TypeError(f"{', '.join(sorted(foreign))}: these options are the HTTP server's")
        try:
            self._settings = make_settings({"model": model, **settings})
        except OptionError as error:
            raise StartupError(error.cause, error.fix) from None
        self._loop = asyncio.new_event_loop()
        # The engine ends with the thread that started it, so that thread has to last.
        self._thread = threading.Thread(target=self._loop.run_forever, name="oarlock-llm", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._engine, self._async_llm = self._run(_start(self._settings))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._async_llm.input_processor.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> list[Output]:
        """One output per prompt, in order. They run together; prompts beyond the engine's queue wait here."""
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        stops = [stop] if isinstance(stop, str) else list(stop)
        return self._run(
            self._generate(given, params or self._async_llm.input_processor.default_params(), stops, ignore_eos)
        )

    def chat(self, messages: list[dict[str, str]], params: SamplingParams | None = None) -> Output:
        """The model's answer to a conversation."""
        ids = self.tokenizer.render_chat(messages)
        return self.generate([ids], params or SamplingParams(max_tokens=256, temperature=0))[0]

    def close(self) -> None:
        """Stop the engine and its ranks. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                self._run(self._engine.close(_CLOSE_S))
            finally:
                self._async_llm.input_processor.tokenizer.close()
                self._stop_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, stops: list[str], ignore_eos: bool
    ) -> list[Output]:
        limit = asyncio.Semaphore(self._settings.max_waiting_requests)

        async def one(prompt: str | Sequence[int]) -> Output:
            async with limit:
                generation = await self._async_llm.generate(prompt, params, stops, ignore_eos)
                try:
                    pieces = (await collect(generation))[0]
                finally:
                    generation.close()
            choice = generation.choices[0]
            return Output(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=choice.request.prompt_token_ids,
                text="".join(piece.text for piece in pieces),
                num_tokens=choice.num_tokens,
                finish_reason=pieces[-1].finish_reason or "",
                stop_reason=pieces[-1].stop_reason,
                num_cached_tokens=choice.num_cached_tokens,
                scores=tuple(score for piece in pieces for score in piece.scores),
            )

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseExceptionGroup as group:  # the task group's: the first failure is what the caller wants to see
            raise group.exceptions[0] from None
        except BaseException:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        # A cancelled download or start ends its process before the loop ends.
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _start(settings: Settings) -> tuple[EngineClient, AsyncLLM]:
    path = await model_path.resolve(settings, _silent)
    generation_config = GenerationConfig.load(path, settings.generation_config)
    tokenizer = await asyncio.to_thread(Tokenizer.load, path)
    engine = await EngineClient.start(settings.engine_config(path), _silent)
    return engine, AsyncLLM(engine, tokenizer, generation_config)


def _silent(phase: str, fraction: float, detail: str = "") -> None:
    """Programs do not want a progress line."""
