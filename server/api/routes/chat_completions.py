"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openapi.document import describe
from server.protocol.chat_completion import ChatRequest
from server.serving.base import AnswerRoute, OpenAIServing

router = APIRouter(route_class=AnswerRoute)
_ABOUT = describe(
    "Answer a conversation",
    "ChatCompletion",
    bodies=("ChatRequest",),
    examples={
        "plain": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 20},
        "stream": {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
    },
    streams=True,
)


@router.post("/v1/chat/completions", openapi_extra=_ABOUT)
async def create_chat_completion(request: Request) -> Response:
    serving = OpenAIServing.of(request)
    asked, headers = await serving.read(request, ChatRequest)
    return await serving.answer(request, asked, headers)
