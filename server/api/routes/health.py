"""Health probes and the version: served without a key, at any time.

`/health/live`: this process answers. `/health/ready` and `/health`: the model is loaded and every rank made progress
lately.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.errors import retry_after
from oarlock.server.serving.base import OpenAIServing
from oarlock.server.serving.server_state import Phase
from oarlock.server.version import VERSION

router = APIRouter(route_class=ErrorHandlingRoute)
_READY = describe(
    "Check readiness",
    "Health",
    example_answer={"status": "ok", "state": "ready"},
    any_query=True,
)


@router.get("/health/live", openapi_extra=describe("Check liveness", "Health", any_query=True))
async def live(request: Request) -> Response:
    """200 as long as the process answers."""
    return JSONResponse({"status": "live", "state": OpenAIServing.of(request).state.phase.value})


@router.get("/health", openapi_extra=_READY)
@router.get("/health/ready", openapi_extra=_READY)
async def ready(request: Request) -> Response:
    """200 when the model is loaded and every rank has made progress lately, else 503 with the reason.

    Of several replicas one is enough: while others are down the status is `degraded`.
    """
    state = OpenAIServing.of(request).state
    reason = state.why_not_ready()
    body: dict[str, Any] = {"status": "ok" if reason is None else "unavailable", "state": state.phase.value}
    if state.phase in (Phase.STARTING, Phase.LOADING):
        body |= {"step": state.loading_step, "progress": round(state.loading_fraction, 4)}
        if state.loading_detail:
            body["detail"] = state.loading_detail
    replicas = state.replica_states()
    if replicas:
        body["replicas"] = replicas
    if reason is None:
        return JSONResponse(body | ({"status": "degraded"} if "down" in replicas else {}))
    return JSONResponse(body | {"reason": reason}, 503, retry_after(5))


@router.get(
    "/version", openapi_extra=describe("Show version", "Version", example_answer={"version": VERSION}, any_query=True)
)
async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})
