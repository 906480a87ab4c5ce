"""Probes and the version: open to everyone, at any time.

`/health/live`: this process answers. `/health/ready` and `/health`: the model is loaded and every rank made progress
lately.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.errors import retry_after
from server.serving import AnswerRoute, Serving
from server.state import Phase
from server.version import VERSION

router = APIRouter(route_class=AnswerRoute)


@router.get("/health/live")
async def live(request: Request) -> Response:
    return JSONResponse({"status": "live", "state": Serving.of(request).state.phase.value})


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    state = Serving.of(request).state
    reason = state.why_not_ready()
    body: dict[str, Any] = {"status": "ok" if reason is None else "unavailable", "state": state.phase.value}
    if state.phase in (Phase.STARTING, Phase.LOADING):
        body |= {"step": state.loading_step, "progress": round(state.loading_fraction, 4)}
    if reason is None:
        return JSONResponse(body)
    return JSONResponse(body | {"reason": reason}, 503, retry_after(5))


@router.get("/version")
async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})
