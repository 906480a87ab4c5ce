"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.api.api_route import ErrorHandlingRoute
from oarlock.server.api.openapi.document import describe
from oarlock.server.protocol.completion import CompletionRequest
from oarlock.server.serving.completion import OpenAIServingCompletion

router = APIRouter(route_class=ErrorHandlingRoute)
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


# The body is read raw and parsed strictly, so the framework only learns its schema for the OpenAPI document.
@router.post("/v1/completions", openapi_extra=_OPENAPI)
async def create_completion(request: Request) -> Response:
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.create(request, body, headers)
