"""The Python interface: prompts in; texts, vectors or scores out. It uses the server's endpoints without HTTP.

    llm = LLM("path/to/model")
    print(llm.generate("import os", SamplingParams(max_tokens=32, temperature=0))[0].outputs[0].text)

Methods, arguments and outputs have the names of vLLM's `LLM`, so that programs written for it run. Every method has an
asynchronous version. An event loop in a thread of its own drives the engine.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

from oarlock.base.errors import StartupError
from oarlock.engine.errors import RequestError
from oarlock.engine.types import EngineInfo
from oarlock.server.config import vllm_flags
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import SERVER_ONLY, make_settings
from oarlock.server.http.request_body import parse
from oarlock.server.json_text import dumps
from oarlock.server.launch.banner import CountedProgress
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.offline import outputs
from oarlock.server.offline.inputs import (
    Adapters,
    LoRARequest,
    Message,
    Params,
    Prompt,
    Prompts,
    SamplingParams,
    adapters_for_each,
    check_names,
    params_for_each,
    read_prompts,
)
from oarlock.server.offline.offline_engine import OfflineEngine
from oarlock.server.offline.outputs import (
    EmbeddingRequestOutput,
    EmbedFields,
    OutputGroup,
    OutputGroupCall,
    PromptInfo,
    RequestOutput,
    ScoreFields,
    ScoringRequestOutput,
)
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import CompletionRequest

_T = TypeVar("_T")
_CLOSE_S = 10.0


class ChatFields(TypedDict, total=False):
    """Fields of a chat request other than its messages and `SamplingParams`."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    documents: Sequence[Mapping[str, Any]]
    reasoning_effort: str


class LLM:
    """A loaded model. `settings` are the server's options by name, such as `tensor_parallel_size=2`.

    Only warnings and errors are logged, unless `log_level` is given.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Load the model. Raises `StartupError`, and `TypeError` for an option of the HTTP server."""
        try:
            self._open(model, settings).result()
        except BaseException:
            self._stop_loop()
            raise

    @classmethod
    async def create(cls, model: str | None = None, **settings: Any) -> Self:
        """Load a model in a program with its own event loop, which keeps running meanwhile. Raises as `LLM` does."""
        llm = cls.__new__(cls)
        try:
            await asyncio.wrap_future(llm._open(model, settings))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(llm._stop_loop))
            raise
        return llm

    @property
    def info(self) -> EngineInfo:
        """Properties of model and machine that the engine has found, such as `max_model_len`."""
        return self._engine.engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        suffix: str | None = None,
        add_special_tokens: bool | None = None,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Return one output for each prompt, in order, like the response of `/v1/completions`.

        `prompts`: a text, token ids, a dictionary with `prompt` or `prompt_token_ids`, or a list of these.
        `sampling_params`: for all, or a list with an entry for each. `use_tqdm`: show a bar; None: if there is a
        terminal and more than one prompt. `lora_request`: the adapter for all, or a list with an entry for each, None
        for no adapter. Raises `oarlock.engine.errors.RequestError` if the server would refuse the request.
        """
        own = {"suffix": suffix, "add_special_tokens": add_special_tokens}
        return self._wait(self._completions(prompts, sampling_params, own, lora_request, use_tqdm))

    async def agenerate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        suffix: str | None = None,
        add_special_tokens: bool | None = None,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Run `generate` in a program with an event loop. Cancelling it aborts unfinished requests."""
        own = {"suffix": suffix, "add_special_tokens": add_special_tokens}
        return await self._await(self._completions(prompts, sampling_params, own, lora_request, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
        **fields: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Return one output per conversation, in order, like the response of `/v1/chat/completions`.

        `messages`: a conversation, or a list of several. Other arguments and errors are those of `generate`.
        """
        return self._wait(self._chat_completions(messages, sampling_params, fields, lora_request, use_tqdm))

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
        **fields: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Run `chat` in a program with an event loop. Cancelling it aborts unfinished requests."""
        return await self._await(self._chat_completions(messages, sampling_params, fields, lora_request, use_tqdm))

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
        **fields: Unpack[EmbedFields],
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, in order, like the response of `/v1/embeddings`. Prompts and errors as in
        `generate`."""
        return self._wait(self._embeddings(prompts, fields, lora_request, use_tqdm))

    async def aembed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | None = None,
        lora_request: Adapters = None,
        **fields: Unpack[EmbedFields],
    ) -> list[EmbeddingRequestOutput]:
        """Run `embed` in a program with an event loop. Cancelling it aborts unfinished requests."""
        return await self._await(self._embeddings(prompts, fields, lora_request, use_tqdm))

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Unpack[ScoreFields],
    ) -> list[ScoringRequestOutput]:
        """Score how well texts go together, as `/v1/score` does. Returns one output for each of `text_2`, in order.

        `text_1`: a text to compare all of `text_2` with, or a list with one text for each.
        """
        return self._wait(self._scores(text_1, text_2, fields, lora_request, use_tqdm))

    async def ascore(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
        **fields: Unpack[ScoreFields],
    ) -> list[ScoringRequestOutput]:
        """Run `score` in a program with an event loop. Cancelling it aborts unfinished requests."""
        return await self._await(self._scores(text_1, text_2, fields, lora_request, use_tqdm))

    def close(self) -> None:
        """Stop the engine and its ranks. Idempotent."""
        if self._thread.is_alive():
            try:
                self._wait(self._engine.close())
            finally:
                self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _open(self, model: str | None, settings: Mapping[str, Any]) -> Future[None]:
        self._request_ids = map(str, itertools.count())
        self._loop = asyncio.new_event_loop()
        # The engine ends with the thread that started it, so that thread has to last.
        self._thread = threading.Thread(target=self._loop.run_forever, name="oarlock-llm", daemon=True)
        self._thread.start()
        return self._submit(self._start({"model": model, **settings}))

    async def _start(self, values: Mapping[str, Any]) -> None:
        foreign = SERVER_ONLY & values.keys()
        if foreign:
            raise TypeError(f"{', '.join(sorted(foreign))}: these options apply only to the HTTP server")
        try:
            settings = make_settings({"log_level": "warning", **vllm_flags.without_harmless(values)})
        except OptionError as error:
            raise StartupError(error.cause, error.fix) from None
        self._engine = await OfflineEngine.start(settings, _silent)

    async def _completions(
        self,
        prompts: Prompts,
        params: Params,
        own: Mapping[str, Any],
        adapters: Adapters,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        given = read_prompts(prompts)
        endpoint = self._engine.completions
        await endpoint.check_model(None)

        def answer(
            prompt: Prompt, chosen: SamplingParams, adapter: LoRARequest | None
        ) -> OutputGroupCall[list[RequestOutput]]:
            asked = self._asked(prompt if isinstance(prompt, str) else None, chosen, adapter)

            async def complete() -> OutputGroup[list[RequestOutput]]:
                fields = {"prompt": prompt, **own, **chosen.as_fields(), "model": adapter and adapter.lora_name}
                _, generation, pieces = await endpoint.run(parse(CompletionRequest, dumps(fields).encode()))
                output = outputs.completion(asked, self.tokenizer, generation, pieces)
                return OutputGroup([output], output.num_tokens)

            return complete

        return await self._all(await self._made(answer, given, params, adapters), len(given), use_tqdm)

    async def _chat_completions(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params,
        fields: ChatFields,
        adapters: Adapters,
        use_tqdm: bool | None,
    ) -> list[RequestOutput]:
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        given: list[Any] = [messages] if is_one else list(messages)
        check_names("chat", fields, ChatFields, "give it in SamplingParams")
        endpoint = self._engine.chat_completions
        await endpoint.check_model(None)

        def answer(
            conversation: Sequence[Message], chosen: SamplingParams, adapter: LoRARequest | None
        ) -> OutputGroupCall[list[RequestOutput]]:
            asked = self._asked(None, chosen, adapter)

            async def complete() -> OutputGroup[list[RequestOutput]]:
                model = adapter and adapter.lora_name
                body = {**chosen.as_chat_fields(), **fields, "messages": list(conversation), "model": model}
                try:
                    request = parse(ChatRequest, dumps(body).encode())
                except RequestError as error:
                    raise endpoint.with_reason(error) from None
                processed, generation, pieces = await endpoint.run(request)
                of_text = replace(asked, prompt=processed.prompt)
                output = outputs.chat_completion(of_text, self.tokenizer, processed, generation, pieces)
                return OutputGroup([output], output.num_tokens)

            return complete

        return await self._all(await self._made(answer, given, params, adapters), len(given), use_tqdm)

    async def _made(
        self,
        answer: Callable[[Any, SamplingParams, LoRARequest | None], OutputGroupCall[list[RequestOutput]]],
        given: Sequence[Any],
        params: Params,
        adapters: Adapters,
    ) -> list[OutputGroupCall[list[RequestOutput]]]:
        """Call `answer` with each of the `given` prompts, its parameters and its adapter, which is loaded first."""
        chosen, adapted = params_for_each(params, len(given)), adapters_for_each(adapters, len(given))
        await self._engine.load_adapters(adapted)
        return list(map(answer, given, chosen, adapted))

    def _asked(self, prompt: str | None, chosen: SamplingParams, adapter: LoRARequest | None) -> PromptInfo:
        wants = chosen.logprobs is not None, chosen.prompt_logprobs is not None
        return PromptInfo(next(self._request_ids), prompt, *wants, adapter)

    async def _embeddings(
        self, prompts: Prompts, fields: EmbedFields, adapters: Adapters, use_tqdm: bool | None
    ) -> list[EmbeddingRequestOutput]:
        check_names("embed", fields, EmbedFields)
        given = read_prompts(prompts)
        models = await self._engine.load_adapters(adapters_for_each(adapters, len(given)))
        answers = outputs.embeddings(self._engine.embeddings, given, models, fields, self._request_ids)
        return await self._all(answers, len(given), use_tqdm)

    async def _scores(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        fields: ScoreFields,
        adapter: LoRARequest | None,
        use_tqdm: bool | None,
    ) -> list[ScoringRequestOutput]:
        check_names("score", fields, ScoreFields)
        count = 1 if isinstance(second, str) else len(second)
        (model,) = await self._engine.load_adapters([adapter])
        answers = outputs.scores(self._engine.scoring, first, second, model, fields, self._request_ids)
        return await self._all(answers, count, use_tqdm)

    async def _all(self, answers: Sequence[OutputGroupCall[list[_T]]], count: int, use_tqdm: bool | None) -> list[_T]:
        """Run `answers`, which return `count` outputs together. The first failure ends the others."""
        limit = asyncio.Semaphore(self._engine.num_at_once)
        is_shown = False if use_tqdm is None and count == 1 else use_tqdm
        num_tokens, began = 0, time.perf_counter()

        async def one(answer: OutputGroupCall[list[_T]]) -> list[_T]:
            nonlocal num_tokens
            async with limit:
                done = await answer()
            num_tokens += done.num_tokens
            bar.add(len(done.outputs), f"{num_tokens / (time.perf_counter() - began):.0f} tokens/s")
            return done.outputs

        with CountedProgress("prompts", count, is_shown=is_shown) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(answer)) for answer in answers]
            except BaseExceptionGroup as failures:  # the caller wants to see the first one
                raise failures.exceptions[0] from None
        return [output for task in tasks for output in task.result()]

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _await(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._submit(work))

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


def _silent(phase: str, fraction: float, detail: str = "") -> None:
    """Ignore progress: programs do not want a progress line."""
