"""`POST /admin/abort`, `/admin/drain`, `/admin/reset_prefix_cache`: control of a running server.

The middleware checks the admin key.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.errors import HttpError
from oarlock.server.observability.logs import event, logger
from oarlock.server.protocol.admin import AbortRequest
from oarlock.server.serving.base import OpenAIServing

router = APIRouter(route_class=ErrorHandlingRoute)
_log = logger("admin")
_ABORT = describe(
    "Abort requests",
    "Aborted",
    bodies=("AbortRequest",),
    examples={"all": {"all": True}},
    example_answer={"aborted": 3},
)
_RESET = describe(
    "Reset prefix cache",
    "CacheReset",
    example_answer={"reset": True, "blocks": 512},
)
_DRAIN = describe(
    "Drain and stop the server",
    "Draining",
    example_answer={"status": "draining", "open": 3},
    status=202,
)


@router.post("/admin/abort", openapi_extra=_ABORT)
async def abort(request: Request) -> Response:
    """Open requests end with the text they have so far: one by its id, or all."""
    serving = OpenAIServing.of(request)
    body, headers = await serving.read(request, AbortRequest)
    async_llm = serving.async_llm
    if body.request_id is None:
        num_aborted = async_llm.abort_all()
    else:
        num_aborted = async_llm.abort(body.request_id)
        if not num_aborted:
            message = "No open request has this id. It may have ended a moment ago."
            raise HttpError(404, message, param="request_id", code="request_not_found")
    _log.info(event("admin_abort", requests=num_aborted))
    return JSONResponse({"aborted": num_aborted}, 200, headers)


@router.post("/admin/reset_prefix_cache", openapi_extra=_RESET)
async def reset_prefix_cache(request: Request) -> Response:
    """Cached prefixes of prompts are forgotten; running requests keep theirs."""
    num_blocks = await OpenAIServing.of(request).async_llm.engine.reset_prefix_cache()
    _log.info(event("admin_reset_prefix_cache", blocks=num_blocks))
    return JSONResponse({"reset": True, "blocks": num_blocks})


@router.post("/admin/drain", openapi_extra=_DRAIN, status_code=202)
async def drain(request: Request) -> Response:
    """New requests are refused, open ones are finished, then the server exits, as after SIGTERM."""
    state = OpenAIServing.of(request).state
    state.drain()
    num_open = state.num_in_flight - 1  # without this request
    _log.info(event("admin_drain", open=num_open))
    return JSONResponse({"status": "draining", "open": num_open}, 202)
