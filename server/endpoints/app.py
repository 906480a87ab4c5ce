"""The FastAPI application: its routes, its error bodies, its middleware, and errors that say what is served."""

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from oarlock.server.config.option_checks import AllowedHosts
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints import completions, models, tokenize
from oarlock.server.endpoints.batches import serving as batches
from oarlock.server.endpoints.batches.serving import OpenAIServingBatches, open_batches
from oarlock.server.endpoints.chat import serving as chat
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions import OpenAIServingCompletion
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
from oarlock.server.endpoints.tokenize import OpenAIServingTokenization
from oarlock.server.errors import HttpError, answer_of
from oarlock.server.http import pages
from oarlock.server.http.api_keys import load_admin_key, load_keys
from oarlock.server.http.middleware import METRICS, PROBES, ApiMiddleware, Cors, RootPath
from oarlock.server.http.openapi import build, with_defaults
from oarlock.server.http.pages import MadeOnce
from oarlock.server.http.server_state import ServerState
from oarlock.server.hub.model_path import served_names
from oarlock.server.observability.logs import AccessLog
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.version import VERSION


def create_app(settings: Settings, state: ServerState, counters: HttpCounters | None = None) -> ASGIApp:
    """The application for one server. It answers 503 until `state` is ready."""
    counters = counters or HttpCounters()
    state.body_memory.max_bytes = settings.body_memory
    app = application(settings, state, counters)
    paths = app.openapi()["paths"]  # made now: later it would hold up answers for a tenth of a second
    counters.routes = frozenset(path for path in paths if "{" not in path)
    keys = load_keys(settings.api_key, settings.api_key_file)
    if settings.batch_dir is not None:
        open_batches(settings, state, counters, keys, app.state)
    admin_key = load_admin_key(settings.admin_api_key, keys)
    if settings.otlp_traces_endpoint is not None:
        from oarlock.server.http.tracing import RequestTracer  # of the extra otel

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
    """Routers that a server with these settings has."""
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
    """The routes without the middleware."""
    app = FastAPI(title="Oarlock", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # a redirect would trust the Host header, and have another body than our errors
    routers = _routers(settings)
    for router in routers:
        app.include_router(router)
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
    app.openapi = lambda: (  # type: ignore[method-assign]
        with_defaults(build(app, routers), serving.sampling_defaults) | servers
    )
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


_SERVED = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and /v1/embeddings"
_BATCHES = ("batches", "files")  # served with an option
_NOT_SERVED = (
    "assistants",
    "audio",
    "chatkit",
    "containers",
    "conversations",
    "evals",
    "fine_tuning",
    "images",
    "moderations",
    "organization",
    "realtime",
    "skills",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)


def not_served(path: str) -> HttpError | None:
    """The error (404) for a path that is known and not served; None: it is not known."""
    if not path.startswith("/v1/"):
        return None
    family = path.removeprefix("/v1/").split("/")[0]
    if family in _BATCHES:
        message = f"{path} is not served here: start the server with --batch-dir DIR for /v1/files and /v1/batches."
    elif family in _NOT_SERVED:
        message = f"{path} is not served here: this server answers {_SERVED}."
    else:
        return None
    return HttpError(404, message, code="route_not_supported")
