"""`POST /tokenize` and `/detokenize`, with and without `/v1`: what the model reads and writes."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestError
from server.api.openapi.document import describe
from server.chat.prompt import render_prompt
from server.protocol.base import MAX_PROMPT_IDS
from server.protocol.json_pieces import InPieces, numbers, pieces_of
from server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, as_chat
from server.serving.base import AnswerRoute, OpenAIServing
from server.serving.sse import until_disconnect, whole_response
from server.tokenizer.tokenizer import Tokenizer, TooManyTokensError

router = APIRouter(route_class=AnswerRoute)
_TOKENIZE = describe(
    "Text or a conversation to token ids",
    "Tokens",
    bodies=("TokenizeRequest", "TokenizeChatRequest"),
    examples={
        "text": {"prompt": "def add(a, b):", "return_token_strs": True},
        "conversation": {"messages": [{"role": "user", "content": "Hi"}]},
    },
    example_answer={"count": 2, "max_model_len": 4096, "tokens": [17, 42], "token_strs": ["def", " add"]},
)
_DETOKENIZE = describe(
    "Token ids to text",
    "Text",
    bodies=("DetokenizeRequest",),
    examples={"ids": {"tokens": [17, 42]}},
    example_answer={"prompt": "def add"},
)


@router.post("/tokenize", openapi_extra=_TOKENIZE)
@router.post("/v1/tokenize", openapi_extra=_TOKENIZE)
async def tokenize(request: Request) -> Response:
    serving = OpenAIServing.of(request)
    service = serving.service
    asked, headers = await serving.read(request, TokenizeRequest, TokenizeChatRequest)
    serving.check_model(asked.model)
    if isinstance(asked, TokenizeRequest):
        marks = asked.add_special_tokens is not False
        ids = await until_disconnect(request, _encode(service.tokenizer, "prompt", marks, asked.prompt))
    else:
        encode = partial(_encode, service.tokenizer, "messages", False)
        ids = (await until_disconnect(request, render_prompt(service.tokenizer, as_chat(asked), encode))).ids
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.max_len,
        "tokens": numbers(ids),
        "token_strs": InPieces(service.tokenizer.token_text, ids, lambda _: 1) if asked.return_token_strs else None,
    }
    return await whole_response(pieces_of(answer), headers)


@router.post("/detokenize", openapi_extra=_DETOKENIZE)
@router.post("/v1/detokenize", openapi_extra=_DETOKENIZE)
async def detokenize(request: Request) -> Response:
    serving = OpenAIServing.of(request)
    asked, headers = await serving.read(request, DetokenizeRequest)
    serving.check_model(asked.model)
    serving.service.check_ids(asked.tokens, "tokens")
    text = await serving.service.tokenizer.atext(asked.tokens)
    return await whole_response(pieces_of({"prompt": text}), headers)


async def _encode(tokenizer: Tokenizer, param: str, marks: bool, text: str) -> list[int]:
    """The ids of a text, however long the context is; no more than a request could bring back."""
    try:
        return await tokenizer.aencode(text, marks, most=MAX_PROMPT_IDS)
    except TooManyTokensError as error:
        message = f"'{param}' has at least {error.at_least} tokens, at most {MAX_PROMPT_IDS} are listed. Send less."
        raise RequestError(message, param) from None
