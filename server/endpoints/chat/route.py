"""`POST /v1/chat/completions`, and `/v1/chat/completions/render`: prompt and parameters, without generating."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.chat.schema import ChatRequest
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)
rendering = APIRouter(route_class=ErrorHandlingRoute)
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
_RENDER = describe(
    "Render chat prompt",
    "Rendered",
    bodies=("ChatRequest",),
    examples={"plain": {"messages": [{"role": "user", "content": "Hi"}]}},
)


@router.post("/v1/chat/completions", openapi_extra=_OPENAPI)
async def create_chat_completion(request: Request) -> Response:
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.create(request, body, headers)


@rendering.post("/v1/chat/completions/render", openapi_extra=_RENDER)
async def render_chat(request: Request) -> Response:
    """The prompt and the resolved parameters of a chat completion, without generating."""
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.render(request, body, headers, each=False)
