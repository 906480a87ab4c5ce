"""`POST /tokenize` and `/detokenize`, with and without `/v1`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from oarlock.server.endpoints.tokenize.serving import OpenAIServingTokenization
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)
_TOKENIZE = describe(
    "Tokenize text",
    "Tokens",
    bodies=("TokenizeRequest", "TokenizeChatRequest"),
    examples={
        "text": {"prompt": "def add(a, b):", "return_token_strs": True},
        "conversation": {"messages": [{"role": "user", "content": "Hi"}]},
    },
    example_answer={"count": 2, "max_model_len": 4096, "tokens": [17, 42], "token_strs": ["def", " add"]},
)
_DETOKENIZE = describe(
    "Detokenize token ids",
    "Text",
    bodies=("DetokenizeRequest",),
    examples={"ids": {"tokens": [17, 42]}},
    example_answer={"prompt": "def add"},
)


@router.post("/tokenize", openapi_extra=_TOKENIZE)
@router.post("/v1/tokenize", openapi_extra=_TOKENIZE)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a conversation as the chat template renders it."""
    serving = OpenAIServingTokenization.of(request)
    body, headers = await serving.read(request, TokenizeRequest, TokenizeChatRequest)
    return await serving.tokenize(request, body, headers)


@router.post("/detokenize", openapi_extra=_DETOKENIZE)
@router.post("/v1/detokenize", openapi_extra=_DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    serving = OpenAIServingTokenization.of(request)
    body, headers = await serving.read(request, DetokenizeRequest)
    return await serving.detokenize(request, body, headers)
