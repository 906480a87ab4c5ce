"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.serving import AnswerRoute, Serving

router = APIRouter(route_class=AnswerRoute)
_BODY = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}},
}


# The body is read raw and parsed strictly, so the framework only learns its schema for the OpenAPI document.
@router.post("/v1/completions", openapi_extra={"requestBody": _BODY})
async def create_completion(request: Request) -> Response:
    return await Serving.of(request).answer_completion(request)
