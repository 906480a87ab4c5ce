"""The FastAPI application: its routes, its error bodies, its middleware, and errors that list the served routes."""

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from oarlock.server.config.option_checks import AllowedHosts
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints import completions, models, tokenize
from oarlock.server.endpoints.batches import serving as batches
from oarlock.server.endpoints.batches.serving import OpenAIServingBatches, open_batches
from oarlock.server.endpoints.chat import serving as chat
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions import OpenAIServingCompletion
from oarlock.server.endpoints.framework_errors import FrameworkErrors
from oarlock.server.endpoints.messages import route as messages
from oarlock.server.endpoints.messages.route import AnthropicServingMessages
from oarlock.server.endpoints.operations import route as operations
from oarlock.server.endpoints.operations.explain import OpenAIServingExplain
from oarlock.server.endpoints.operations.live_state import OpenAIServingLiveState
from oarlock.server.endpoints.pooling import route as pooling
from oarlock.server.endpoints.pooling.scoring import OpenAIServingScoring
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.endpoints.responses import serving as responses
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.endpoints.text_permits import TextPermits
from oarlock.server.endpoints.tokenize import OpenAIServingTokenization
from oarlock.server.http import pages
from oarlock.server.http.api_keys import load_admin_key, load_keys
from oarlock.server.http.middleware import METRICS, PROBES, ApiMiddleware, Cors, RootPath
from oarlock.server.http.openapi import build, with_defaults
from oarlock.server.http.pages import CachedDocuments
from oarlock.server.http.server_state import ServerState
from oarlock.server.hub.model_path import served_names
from oarlock.server.observability.logs import AccessLog
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.version import VERSION


def create_app(settings: Settings, state: ServerState, counters: HttpCounters | None = None) -> ASGIApp:
    """Return the application for one server. It responds with 503 until `state` is ready."""
    counters = counters or HttpCounters()
    state.body_memory.max_bytes = settings.body_memory
    app = application(settings, state, counters)
    paths = app.openapi()["paths"]  # built now, because later it would delay responses by a tenth of a second
    counters.routes = frozenset(path for path in paths if "{" not in path)
    keys = load_keys(settings.api_key, settings.api_key_file)
    if settings.batch_dir is not None:
        open_batches(settings, state, counters, keys, app.state)
    admin_key = load_admin_key(settings.admin_api_key, keys)
    if settings.otlp_traces_endpoint is not None:
        from oarlock.server.http.tracing import RequestTracer  # needs the extra otel

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
        page=pages.PATHS if settings.web_page else frozenset(),
        cors=Cors(settings.allowed_origins),
        access_log=AccessLog(PROBES | METRICS) if settings.access_log else None,
    )
    if settings.root_path is None:
        return guard
    return RootPath(settings.root_path, guard, [*paths, *pages.PATHS])


def _routers(settings: Settings) -> tuple[APIRouter, ...]:
    """Return the routers of a server with these settings."""
    return (
        completions.router,
        chat.router,
        responses.router,
        messages.router,
        pooling.router,
        completions.rendering,
        chat.rendering,
        tokenize.router,
        models.router,
        operations.router,
        *([batches.router] if settings.batch_dir is not None else []),
        *([pages.router] if settings.web_page else []),
    )


def application(settings: Settings, state: ServerState, counters: HttpCounters) -> FastAPI:
    """Return the routes without the middleware."""
    app = FastAPI(title="Oarlock", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    # A redirect would trust the Host header, and its body would not have Oarlock's error format.
    app.router.redirect_slashes = False
    routers = _routers(settings)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(HTTPException, FrameworkErrors(routers, settings.root_path or ""))
    serving = OpenAIServing(settings, state, counters)
    app.state.serving = serving
    app.state.documents = CachedDocuments()
    app.state.text_permits = TextPermits(settings)
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
    app.openapi = lambda: (  # type: ignore[method-assign]
        with_defaults(build(app, routers), serving.sampling_defaults) | servers
    )
    return app
