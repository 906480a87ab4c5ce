"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.serving import AnswerRoute, Serving

router = APIRouter(route_class=AnswerRoute)
_BODY = {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatRequest"}}}}


@router.post("/v1/chat/completions", openapi_extra={"requestBody": _BODY})
async def create_chat_completion(request: Request) -> Response:
    return await Serving.of(request).answer_chat(request)
