"""What routes share: the settings, the state, the service, and how a request is read and answered.

The thin middle between HTTP and `service`: knows both vocabularies, decides nothing about generation.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError, RequestError
from engine.stats import EngineStats
from engine.types import EngineInfo
from server.chat.message_parser import AnswerShape
from server.config.model_path import served_names
from server.config.settings import Settings
from server.errors import ClientGoneError, DeadlineError, HttpError, ModelNotFoundError, describe, error_response
from server.llm.async_llm import AsyncLLM, ProcessedRequest
from server.llm.generation import Engine, Generation, collect
from server.llm.generation_config import GenerationConfig
from server.observability.logs import event, logger
from server.observability.metrics import HttpCounters
from server.protocol.base import MAX_TIMEOUT_S, StrictModel
from server.protocol.chat_completion import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.large_body.reader import takes_long
from server.protocol.request_body import ignored_header, parse_any, read_json, unknown_parameters
from server.serving.chat_completion import ChatCompletionWriter
from server.serving.chat_plan import plan_chat
from server.serving.request_context import client_of, label_of, request_id_of, salt_of
from server.serving.response_writer import CompletionWriter, Details, Head, ResponseWriter
from server.serving.server_state import ServerState
from server.serving.sse import EventStream, until_disconnect, whole_response
from server.tokenizer.tokenizer import Tokenizer
from server.version import VERSION

STATS_TIMEOUT_S = 2.0
_ParsedT = TypeVar("_ParsedT", bound=StrictModel)
_log = logger("requests")


class OpenAIServing:
    """One per application; routes find it at `request.app.state.serving`."""

    def __init__(self, settings: Settings, state: ServerState, counters: HttpCounters) -> None:
        self.settings = settings
        self.state = state
        self.counters = counters
        self.model_names = served_names(settings)
        self._last_stats = EngineStats()

    @staticmethod
    def of(request: Request) -> OpenAIServing:
        return request.app.state.serving

    @property
    def service(self) -> AsyncLLM:
        service = self.state.service
        if service is None:
            raise HttpError(503, "The server is not ready.", code="server_loading")
        return service

    @property
    def info(self) -> EngineInfo:
        return self.service.engine.info

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's generation config sets where a request says nothing; empty until it is known."""
        return self.state.service.generation_config.sampling if self.state.service else {}

    def fingerprint(self) -> str:
        """Changes when something that changes numbers does."""
        text = f"{VERSION} {self.info.numbers_digest} {self.service.tokenizer.digest}"
        return "fp_" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def check_model(self, name: str | None) -> str:
        """The name to echo back. Raises `ModelNotFoundError`."""
        if name is None:
            return self.model_names[0]
        if name in self.model_names:
            return name
        if self.settings.ignore_model_case and name.casefold() in map(str.casefold, self.model_names):
            return name
        raise ModelNotFoundError(name, self.model_names)

    async def read(self, request: Request, *schemas: type[_ParsedT]) -> tuple[_ParsedT, dict[str, str]]:
        """The checked body, and the headers that every answer to it carries. With two schemas the second is for
        conversations."""
        body = await read_json(request, self.settings.max_body_size)
        is_strict = self.settings.strict_parameters
        if takes_long(body):
            parsed, unknown = await until_disconnect(request, self.state.large_bodies.read(schemas, body, is_strict))
        else:
            parsed = parse_any(schemas, body)
            unknown = unknown_parameters(parsed, is_strict)
        self.counters.ignored_parameters += len(unknown)
        return parsed, ignored_header(unknown)

    async def answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, headers: dict[str, str]
    ) -> Response:
        """Start the generation, then stream it or collect it. Every refusal comes before the first byte."""
        model = self.check_model(asked.model)
        asked.timeout = self._time_limit(request, asked.timeout)
        asked.cache_salt = salt_of(request.scope, asked.cache_salt)
        plan, shape = await until_disconnect(request, self._planned(asked))
        generation = self.service.start(plan)
        try:
            generation.request_id = request_id = request_id_of(request.scope)
            generation.client = client_of(request.scope, asked.user)
            generation.key_label = label_of(request.scope)
            form = self._format(asked, model, request_id, generation, shape)
            if asked.stream:
                await until_disconnect(request, generation.wait_first_event())
                return EventStream(generation, form, self._tells_usage(asked), headers, request_id)
            pieces = await until_disconnect(request, collect(generation))
            return await whole_response(form.whole(pieces, generation), headers)
        except BaseException:
            generation.close()
            raise

    async def _planned(self, asked: CompletionRequest | ChatRequest) -> tuple[ProcessedRequest, AnswerShape]:
        """The plan, made within the time limit. Raises `DeadlineError`."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(asked.timeout):
                if isinstance(asked, CompletionRequest):
                    plan, shape = await self.service.plan_completion(asked), AnswerShape()
                else:
                    chat = await plan_chat(self.service, asked)
                    plan, shape = chat.plan, chat.shape
        except TimeoutError:
            raise DeadlineError(asked.timeout or 0.0) from None
        return replace(plan, spent_s=time.monotonic() - begun), shape

    def _time_limit(self, request: Request, asked: float | None) -> float | None:
        """The shortest of what the field, the header and the operator allow."""
        limits = [asked, self.settings.request_timeout]
        given = request.headers.get("x-request-timeout")
        if given is not None:
            limits.append(_seconds(given))
        return min((limit for limit in limits if limit is not None), default=None)

    def _tells_usage(self, asked: CompletionRequest | ChatRequest) -> bool:
        """Whether a stream ends with the usage."""
        return asked.include_usage or self.settings.always_stream_usage

    def _format(
        self,
        asked: CompletionRequest | ChatRequest,
        model: str,
        request_id: str,
        generation: Generation,
        shape: AnswerShape,
    ) -> ResponseWriter:
        created, fingerprint, tokenizer = int(time.time()), self.fingerprint(), self.service.tokenizer
        details = Details(
            logprobs=asked.logprobs if isinstance(asked, CompletionRequest) else _chat_logprobs(asked),
            prompt_logprobs=asked.prompt_logprobs,
            token_ids=bool(asked.return_token_ids),
            tokens_as_ids=bool(asked.return_tokens_as_token_ids),
            usage=bool(asked.stream and self._tells_usage(asked)),
            continuous_usage=asked.continuous_usage,
            keep=asked.n if asked.num_generated > (asked.n or 1) else None,
        )
        if isinstance(asked, CompletionRequest):
            head = Head(f"cmpl-{request_id}", "text_completion", created, model, fingerprint)
            return CompletionWriter(head, tokenizer, generation, details)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = Head(f"chatcmpl-{request_id}", kind, created, model, fingerprint)
        return ChatCompletionWriter(head, tokenizer, generation, details, shape)

    async def engine_numbers(self) -> tuple[EngineStats, EngineInfo | None]:
        """The engine's statistics; the last ones known when it does not answer in time."""
        service = self.state.service
        if service is None:
            return self._last_stats, None
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                self._last_stats = await service.engine.stats()
        except (TimeoutError, EngineError) as error:
            _log.warning(event("statistics_stale", cause=type(error).__name__))
        return self._last_stats, service.engine.info


def connect(
    settings: Settings,
    state: ServerState,
    counters: HttpCounters,
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig | None = None,
) -> AsyncLLM:
    """Put a running engine behind the routes. The state decides when they open."""
    service = AsyncLLM(engine, tokenizer, generation_config, strict_max_tokens=settings.strict_max_tokens)
    service.on_finish.append(counters.finish)
    if settings.enable_log_requests:
        service.on_finish.append(_log_generation)
    state.service = service
    return service


def _chat_logprobs(asked: ChatRequest) -> int | None:
    return (asked.top_logprobs or 0) if asked.logprobs else None


def _seconds(text: str) -> float:
    """The value of the header that limits a request's time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:  # NaN too
        message = f"The header X-Request-Timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}."
        raise RequestError(message, "X-Request-Timeout")
    return seconds


def _log_generation(generation: Generation) -> None:
    """The one line of a request. Never its text."""
    now = time.monotonic()
    first = generation.first_token_at
    reasons = ",".join(choice.finish_reason or "abort" for choice in generation.choices[:8])
    fields: dict[str, Any] = {
        "request_id": generation.request_id,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
        "choices": len(generation.choices),
        "ttft_s": None if first is None else first - generation.arrival,
        "total_s": now - generation.arrival,
        "finish": reasons,
        "client": generation.client or None,
    }
    _log.info(event("request_done", **fields))


class AnswerRoute(APIRoute):
    """A route whose every exception becomes an answer in our shape, our own bugs included. One that answers GET answers
    HEAD with the same head; the connection leaves the body out."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            scope = {**scope, "method": "GET"}
        await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientGoneError:
                return Response(status_code=499)  # nobody reads it; the counters do
            except HttpError as error:
                return error_response(error)
            except Exception as error:
                described = describe(error)
                if described.status == 500:
                    line = event("request_failed", request_id=request_id_of(request.scope), path=request.url.path)
                    _log.error(line, exc_info=error)
                return error_response(described)

        return answer
