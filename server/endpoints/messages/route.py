"""`/v1/messages`: Anthropic's messages, and the tokens of their prompts."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.messages.schema import CountTokensRequest, MessagesRequest
from oarlock.server.endpoints.messages.serving import AnthropicServingMessages
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)
_HI = [{"role": "user", "content": "Hi"}]
_CREATE = describe(
    "Create message",
    "Message",
    bodies=("MessagesRequest",),
    examples={
        "plain": {"messages": _HI, "max_tokens": 20},
        "stream": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 20,
                   "stream": True},
    },
    streams=True,
)  # fmt: skip
_COUNT = describe(
    "Count the tokens of a message's prompt",
    "MessageTokensCount",
    bodies=("CountTokensRequest",),
    examples={"hi": {"messages": _HI}},
)


@router.post("/v1/messages", openapi_extra=_CREATE)
async def create_message(request: Request) -> Response:
    serving = AnthropicServingMessages.of(request)
    body, headers = await serving.read(request, MessagesRequest)
    return await serving.respond(request, body, headers)


@router.post("/v1/messages/count_tokens", openapi_extra=_COUNT)
async def count_tokens(request: Request) -> Response:
    serving = AnthropicServingMessages.of(request)
    body, headers = await serving.read(request, CountTokensRequest)
    return await serving.count(request, body, headers)
