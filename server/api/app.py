"""The FastAPI application: its routes, its error bodies and its middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from oarlock.server.api.constant_document import MadeOnce
from oarlock.server.api.cors import Cors
from oarlock.server.api.error_shape import answer_of
from oarlock.server.api.middleware import METRICS, PROBES, ApiMiddleware
from oarlock.server.api.not_served import not_served
from oarlock.server.api.openapi.document import build, with_defaults
from oarlock.server.api.root_path import RootPath
from oarlock.server.api.routes import (
    admin,
    chat_completions,
    completions,
    health,
    live_state,
    messages,
    metrics,
    models,
    pooling,
    render,
    requests,
    responses,
    server_info,
    tokenize,
    web_page,
)
from oarlock.server.api.routes.batches import batches, files
from oarlock.server.config.allowed_hosts import AllowedHosts
from oarlock.server.config.api_keys import load_admin_key, load_keys
from oarlock.server.config.model_path import served_names
from oarlock.server.config.settings import Settings
from oarlock.server.errors import HttpError
from oarlock.server.observability.access_log import AccessLog
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.serving.base import OpenAIServing
from oarlock.server.serving.batches.serving import OpenAIServingBatches, open_batches
from oarlock.server.serving.chat_completion import OpenAIServingChatCompletion
from oarlock.server.serving.completion import OpenAIServingCompletion
from oarlock.server.serving.explain.endpoint import OpenAIServingExplain
from oarlock.server.serving.live_state import OpenAIServingLiveState
from oarlock.server.serving.messages.serving import AnthropicServingMessages
from oarlock.server.serving.pooling.embedding import OpenAIServingEmbedding
from oarlock.server.serving.pooling.scoring import OpenAIServingScoring
from oarlock.server.serving.responses.serving import OpenAIServingResponses
from oarlock.server.serving.server_state import ServerState
from oarlock.server.serving.tokenization import OpenAIServingTokenization
from oarlock.server.version import VERSION


def create_app(settings: Settings, state: ServerState, counters: HttpCounters | None = None) -> ASGIApp:
    """The application for one server. It answers 503 until `state` is ready."""
    counters = counters or HttpCounters()
    state.body_memory.max_bytes = settings.body_memory
    app = application(settings, state, counters)
    counters.routes = frozenset(path for path in app.openapi()["paths"] if "{" not in path)
    keys = load_keys(settings.api_key, settings.api_key_file)
    if settings.batch_dir is not None:
        open_batches(settings, state, counters, keys, app.state)
    admin_key = load_admin_key(settings.admin_api_key, keys)
    if settings.otlp_traces_endpoint is not None:
        from oarlock.server.serving.explain.tracing import RequestTracer  # of the extra otel

        state.tracer = RequestTracer(settings.otlp_traces_endpoint, served_names(settings)[0])
    hosts = AllowedHosts("localhost" if settings.uds else settings.host, settings.allowed_hosts)
    guard = ApiMiddleware(
        app,
        state,
        counters,
        keys,
        admin_key,
        hosts,
        open_metrics=settings.opens_metrics,
        open_requests=settings.opens_requests,
        page=web_page.PATHS if settings.web_page else frozenset(),
        cors=Cors(settings.allowed_origins),
        access_log=AccessLog(PROBES | METRICS) if settings.access_log else None,
    )
    if settings.root_path is None:
        return guard
    return RootPath(settings.root_path, guard, [*app.openapi()["paths"], *web_page.PATHS])


def application(settings: Settings, state: ServerState, counters: HttpCounters) -> FastAPI:
    """The routes without the middleware."""
    app = FastAPI(title="Oarlock", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a redirect would trust the Host header, and have another body than our errors
    for module in (
        completions,
        chat_completions,
        responses,
        messages,
        pooling,
        render,
        tokenize,
        models,
        server_info,
        health,
        metrics,
        live_state,
        requests,
        admin,
    ):
        app.include_router(module.router)
    if settings.batch_dir is not None:
        app.include_router(files.router)
        app.include_router(batches.router)
    if settings.web_page:
        app.include_router(web_page.router)
    app.add_exception_handler(HTTPException, _framework_error)
    serving = OpenAIServing(settings, state, counters)
    app.state.serving = serving
    app.state.documents = MadeOnce()
    for endpoint in (
        OpenAIServingCompletion,
        OpenAIServingChatCompletion,
        OpenAIServingResponses,
        AnthropicServingMessages,
        OpenAIServingEmbedding,
        OpenAIServingScoring,
        OpenAIServingTokenization,
        OpenAIServingLiveState,
        OpenAIServingExplain,
        OpenAIServingBatches,
    ):
        setattr(app.state, endpoint.state_name, endpoint(settings, state, counters))
    servers = {} if settings.root_path is None else {"servers": [{"url": settings.root_path}]}
    app.openapi = lambda: with_defaults(build(app), serving.sampling_defaults) | servers  # type: ignore[method-assign]
    return app


async def _framework_error(request: Request, error: Exception) -> Response:
    """Errors of the framework itself, with the body that all errors have."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        message = f"There is no route {request.method} {path}; GET /docs shows those that there are."
        unknown = HttpError(404, message, code="route_not_found")
        return answer_of(not_served(path) or unknown, request.scope)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not answer to {request.method}. Send {allowed.replace(', ', ' or ')}."
        headers = {"Allow": "GET, HEAD" if allowed == "GET" else allowed}
        return answer_of(HttpError(405, message, code="method_not_allowed", headers=headers), request.scope)
    return answer_of(HttpError(error.status_code, str(error.detail), headers=error.headers), request.scope)
