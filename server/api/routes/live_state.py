"""`GET /v1/state`: what the server is doing now, as JSON, for pages and terminals. Open to whom `/metrics` is open."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.serving.live_state import OpenAIServingLiveState

router = APIRouter(route_class=ErrorHandlingRoute)
_EXAMPLE = {
    "model": "oarlock-demo",
    "version": "1.0.0",
    "time": 1767225600.0,
    "uptime_s": 61.5,
    "status": "ok",
    "requests": {"running": 1, "waiting": 0, "finished": 12, "refused": 0, "invalid": 0},
    "tokens_per_second": {"prompt": 0.0, "generation": 38.5},
    "engines": [
        {
            "engine": 0,
            "status": "ready",
            "running": 1,
            "waiting": 0,
            "kv": {
                "block_size": 16,
                "total": 64,
                "held": 3,
                "cached": 12,
                "free": 49,
                "cells_of": 1,
                "map": "h3c12f49",
            },
            "step": {
                "count": 3402,
                "last_ms": 25.1,
                "median_ms": 25.8,
                "p99_ms": 61.2,
                "ranks": [
                    {"rank": 0, "last_ms": 24.6, "median_ms": 25.2},
                    {"rank": 1, "last_ms": 24.7, "median_ms": 25.2},
                ],
            },
            "slowest": [
                {
                    "id": "cmpl-0f3c1d",
                    "state": "running",
                    "age_s": 1.204,
                    "prompt_tokens": 35,
                    "cached_tokens": 32,
                    "output_tokens": 11,
                }
            ],
        }
    ],
}


@router.get("/v1/state", openapi_extra=describe("Show live state", "State", example_answer=_EXAMPLE))
async def show_state(request: Request) -> Response:
    """Requests, KV blocks and step times of each engine at this moment; also while the model loads."""
    return JSONResponse(await OpenAIServingLiveState.of(request).show(), headers={"Cache-Control": "no-store"})
