"""`/v1/capabilities`, `/load`, `/openapi.json`, and `/docs`, a page that needs no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.constant_document import ConstantDocument, MadeOnce, page_headers
from oarlock.server.api.openapi.capabilities import capabilities
from oarlock.server.api.openapi.docs_page import STYLE_SOURCE, page
from oarlock.server.api.openapi.document import describe
from oarlock.server.serving.base import OpenAIServing

router = APIRouter(route_class=ErrorHandlingRoute)
_PAGE_HEADERS = page_headers({"style-src": STYLE_SOURCE, "img-src": "data:"})


@router.get("/v1/capabilities", openapi_extra=describe("Show capabilities", "Capabilities"))
async def show_capabilities(request: Request) -> Response:
    """Parameters with their ranges, limits and features of this server."""
    return _once(
        request,
        "capabilities",
        lambda: _json(capabilities(request.app.openapi(), OpenAIServing.of(request))),
    )


@router.get(
    "/load",
    openapi_extra=describe(
        "Show load",
        "Load",
        example_answer={
            "server_load": 3,
            "requests_running": 3,
            "requests_waiting": 0,
            "tokens_waiting": 0,
            "kv_cache_usage": 0.12,
        },
    ),
)
async def load(request: Request) -> Response:
    """Open requests, running and waiting ones, and the share of the KV cache in use."""
    serving = OpenAIServing.of(request)
    replicas, _ = await serving.engine_numbers()
    return JSONResponse(
        {
            "server_load": serving.state.num_in_flight - 1,  # without this request
            "requests_running": sum(stats.num_requests_running for stats in replicas),
            "requests_waiting": sum(stats.num_requests_waiting for stats in replicas),
            "tokens_waiting": sum(stats.num_waiting_tokens for stats in replicas),
            "kv_cache_usage": sum(stats.kv_cache_usage for stats in replicas) / len(replicas),
        }
    )


@router.get("/docs", openapi_extra=describe("Show documentation", "", media="text/html", any_query=True))
async def docs(request: Request) -> Response:
    return _once(
        request,
        "docs",
        lambda: ConstantDocument.of(page(request.app.openapi()).encode(), "text/html; charset=utf-8", _PAGE_HEADERS),
    )


@router.get("/openapi.json", include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    """Every route, parameter and answer, as OpenAPI 3.1."""
    return _once(request, "openapi", lambda: _json(request.app.openapi()))


def _once(request: Request, name: str, make: Callable[[], ConstantDocument]) -> Response:
    made: MadeOnce = request.app.state.documents
    return made.get(name, OpenAIServing.of(request).state.async_llm, make).answer(request)


def _json(value: Any) -> ConstantDocument:
    return ConstantDocument.of(bytes(JSONResponse(value).body), "application/json")
