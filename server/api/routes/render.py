"""`POST /v1/completions/render` and `/v1/chat/completions/render`: prompts and parameters, without generating."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.protocol.chat_completion import ChatRequest
from oarlock.server.protocol.completion import CompletionRequest
from oarlock.server.serving.chat_completion import OpenAIServingChatCompletion
from oarlock.server.serving.completion import OpenAIServingCompletion

router = APIRouter(route_class=ErrorHandlingRoute)
_COMPLETION = describe(
    "Render completion prompt",
    "RenderedPrompts",
    bodies=("CompletionRequest",),
    examples={"plain": {"prompt": "def add(a, b):", "max_tokens": 20}},
)
_CHAT = describe(
    "Render chat prompt",
    "Rendered",
    bodies=("ChatRequest",),
    examples={"plain": {"messages": [{"role": "user", "content": "Hi"}]}},
)


@router.post("/v1/completions/render", openapi_extra=_COMPLETION)
async def render_completion(request: Request) -> Response:
    """The prompts and the resolved parameters of a completion, an object for each prompt, without generating."""
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.render(request, body, headers, each=True)


@router.post("/v1/chat/completions/render", openapi_extra=_CHAT)
async def render_chat(request: Request) -> Response:
    """The prompt and the resolved parameters of a chat completion, without generating."""
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.render(request, body, headers, each=False)
