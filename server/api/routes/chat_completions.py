"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.protocol.chat_completion import ChatRequest
from oarlock.server.serving.chat_completion import OpenAIServingChatCompletion

router = APIRouter(route_class=ErrorHandlingRoute)
_OPENAPI = describe(
    "Create chat completion",
    "ChatCompletion",
    bodies=("ChatRequest",),
    examples={
        "plain": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 20},
        "stream": {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
    },
    streams=True,
)


@router.post("/v1/chat/completions", openapi_extra=_OPENAPI)
async def create_chat_completion(request: Request) -> Response:
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.create(request, body, headers)
