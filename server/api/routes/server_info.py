"""`/v1/capabilities`, `/load`, and `/docs`, a page that needs no network."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from server.api.api_route import ErrorHandlingRoute
from server.api.openapi.capabilities import capabilities
from server.api.openapi.docs_page import page
from server.api.openapi.document import describe
from server.serving.base import OpenAIServing

router = APIRouter(route_class=ErrorHandlingRoute)


@router.get("/v1/capabilities", openapi_extra=describe("Show capabilities", "Capabilities"))
async def show_capabilities(request: Request) -> Response:
    """Parameters with their ranges, limits and features of this server."""
    return JSONResponse(capabilities(request.app.openapi(), OpenAIServing.of(request)))


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


@router.get("/docs", openapi_extra=describe("Show documentation", "", media="text/html"))
async def docs(request: Request) -> Response:
    return HTMLResponse(page(request.app.openapi()))
