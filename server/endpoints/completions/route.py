"""`POST /v1/completions`, and `/v1/completions/render`: prompts and parameters, without generating."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.completions.schema import CompletionRequest
from oarlock.server.endpoints.completions.serving import OpenAIServingCompletion
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)
rendering = APIRouter(route_class=ErrorHandlingRoute)
_OPENAPI = describe(
    "Create completion",
    "Completion",
    bodies=("CompletionRequest",),
    examples={
        "plain": {"prompt": "def add(a, b):", "max_tokens": 20, "temperature": 0},
        "stream": {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}},
        "score": {"prompt": "The sea is blue", "max_tokens": 0, "echo": True, "logprobs": 1},
    },
    streams=True,
)
_RENDER = describe(
    "Render completion prompt",
    "RenderedPrompts",
    bodies=("CompletionRequest",),
    examples={"plain": {"prompt": "def add(a, b):", "max_tokens": 20}},
)


# The body is read raw and parsed strictly, so the framework only learns its schema for the OpenAPI document.
@router.post("/v1/completions", openapi_extra=_OPENAPI)
async def create_completion(request: Request) -> Response:
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.create(request, body, headers)


@rendering.post("/v1/completions/render", openapi_extra=_RENDER)
async def render_completion(request: Request) -> Response:
    """The prompts and the resolved parameters of a completion, an object for each prompt, without generating."""
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.render(request, body, headers, each=True)
