"""The FastAPI application: which routes exist, how errors look, what stands before them. No engine is started here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import HttpError, error_response
from server.guard import Guard
from server.metrics import HttpCounters
from server.routes import chat, completions, health, metrics, models
from server.schemas import ChatRequest, CompletionRequest
from server.serving import Serving
from server.settings import Settings
from server.state import ServerState
from server.version import VERSION


def create_app(settings: Settings, state: ServerState, counters: HttpCounters | None = None) -> ASGIApp:
    """The application for one server. It answers 503 until `state` is ready and holds a service."""
    app = FastAPI(title="Oarlock", version=VERSION, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    counters = counters or HttpCounters()
    app.state.serving = Serving(settings, state, counters)
    for module in (completions, chat, models, health, metrics):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _framework_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    counters.routes = frozenset(path for path in app.openapi()["paths"] if "{" not in path)
    return Guard(app, state, counters, settings.host, settings.api_key)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The document, with the schemas of the bodies that routes read for themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [
            (CompletionRequest, "validation"),
            (ChatRequest, "validation"),
        ]
        _, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema


async def _framework_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals, in our shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        return error_response(HttpError(404, f"There is no route {request.method} {path}.", code="route_not_found"))
    if error.status_code == 405:
        message = f"{path} does not answer to {request.method}."
        return error_response(HttpError(405, message, code="method_not_allowed", headers=error.headers))
    return error_response(HttpError(error.status_code, str(error.detail), headers=error.headers))
