"""What routes share: the settings, the state, the service, and how a request is read and answered.

The thin middle between HTTP and `service`: knows both vocabularies, decides nothing about generation.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineError
from engine.stats import EngineStats
from engine.types import EngineInfo
from server.answers import AnswerFormat, ChatFormat, CompletionFormat, Head
from server.body import ignored_parameters, parse, read_json
from server.errors import ClientGoneError, HttpError, ModelNotFoundError, describe, error_response
from server.guard import request_id_of
from server.logs import event, logger
from server.metrics import HttpCounters
from server.model_files import served_names
from server.schemas import ChatRequest, CompletionRequest
from server.service import Engine, Generation, GenerationService
from server.settings import Settings
from server.state import ServerState
from server.streaming import EventStream, collect, until_disconnect
from server.tokenizer import Tokenizer
from server.version import VERSION

STATS_TIMEOUT_S = 2.0
_log = logger("requests")


class Serving:
    """One per application; routes find it at `request.app.state.serving`."""

    def __init__(self, settings: Settings, state: ServerState, counters: HttpCounters) -> None:
        self.settings = settings
        self.state = state
        self.counters = counters
        self.model_names = served_names(settings)
        self._last_stats = EngineStats()

    @staticmethod
    def of(request: Request) -> Serving:
        return request.app.state.serving

    @property
    def service(self) -> GenerationService:
        service = self.state.service
        if service is None:
            raise HttpError(503, "The server is not ready.", code="server_loading")
        return service

    @property
    def info(self) -> EngineInfo:
        return self.service.engine.info

    def fingerprint(self) -> str:
        """Changes when something that changes numbers does."""
        info = self.info
        parts = (VERSION, info.architecture, info.dtype, info.device, info.attention_backend)
        text = "|".join((*parts, str(info.tensor_parallel_size), str(info.num_parameters)))
        return "fp_" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def check_model(self, name: str | None) -> str:
        """The name to echo back. Raises `ModelNotFoundError`."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ModelNotFoundError(name, self.model_names)
        return name

    async def answer_completion(self, request: Request) -> Response:
        body = await read_json(request, self.settings.max_body_size)
        return await self._answer(request, parse(CompletionRequest, body))

    async def answer_chat(self, request: Request) -> Response:
        body = await read_json(request, self.settings.max_body_size)
        return await self._answer(request, parse(ChatRequest, body))

    async def _answer(self, request: Request, asked: CompletionRequest | ChatRequest) -> Response:
        """Start the generation, then stream it or collect it. Every refusal comes before the first byte."""
        model = self.check_model(asked.model)
        request_id = request_id_of(request.scope)
        headers = {"X-Ignored-Parameters": ignored} if (ignored := ignored_parameters(asked)) else {}
        service = self.service
        if isinstance(asked, CompletionRequest):
            generation = await service.complete(asked)
        else:
            generation = await service.chat(asked)
        try:
            form = self._format(asked, model, request_id)
            generation.request_id = request_id
            if asked.stream:
                await until_disconnect(request, generation.verdict())
                return EventStream(generation, form, asked.include_usage, headers, request_id)
            pieces = await until_disconnect(request, collect(generation))
            return Response(form.whole(pieces, generation), 200, headers, "application/json")
        except BaseException:
            generation.close()
            raise

    def _format(self, asked: CompletionRequest | ChatRequest, model: str, request_id: str) -> AnswerFormat:
        created, fingerprint, tokenizer = int(time.time()), self.fingerprint(), self.service.tokenizer
        usage = bool(asked.stream and asked.include_usage)
        if isinstance(asked, CompletionRequest):
            head = Head(f"cmpl-{request_id}", "text_completion", created, model, fingerprint)
            return CompletionFormat(head, tokenizer, asked.logprobs is not None, usage)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = Head(f"chatcmpl-{request_id}", kind, created, model, fingerprint)
        return ChatFormat(head, tokenizer, bool(asked.logprobs), usage)

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
    settings: Settings, state: ServerState, counters: HttpCounters, engine: Engine, tokenizer: Tokenizer
) -> GenerationService:
    """Put a running engine behind the routes. The state decides when they open."""
    service = GenerationService(engine, tokenizer)
    service.on_finish.append(counters.finish)
    if settings.enable_log_requests:
        service.on_finish.append(_log_generation)
    state.service = service
    return service


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
    }
    _log.info(event("request_done", **fields))


class AnswerRoute(APIRoute):
    """A route whose every exception becomes an answer in our shape, our own bugs included."""

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
