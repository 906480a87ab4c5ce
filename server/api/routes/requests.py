"""`GET /v1/requests/{id}`: what happened to one of the last requests.

The middleware checks the admin key, where the server has keys or is not for this machine alone.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.serving.explain.endpoint import OpenAIServingExplain

router = APIRouter(route_class=ErrorHandlingRoute)


@router.get("/v1/requests/{id}", openapi_extra=describe("Explain request", "ExplainedRequest"))
async def explain_request(request: Request, id: str) -> Response:
    """Its timeline, where its time went, and one sentence on what would help."""
    return JSONResponse(await OpenAIServingExplain.of(request).explain(id), headers={"Cache-Control": "no-store"})
