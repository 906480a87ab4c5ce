"""`POST /tokenize` and `/detokenize`, with and without `/v1`: texts and conversations to token ids, and ids to text."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.server.chat.prompt import render_prompt
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.endpoints.text_permits import TextPermits
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.body_cost import BYTES_PER_VALUE
from oarlock.server.http.openapi import describe
from oarlock.server.http.server_sent_events import whole_response
from oarlock.server.json_text import StreamedList, numbers, pieces_of
from oarlock.server.llm.tokenizer import TooManyTokensError
from oarlock.server.schemas.chat import DetokenizeRequest, TokenFields, TokenizeChatRequest, TokenizeRequest, as_chat
from oarlock.server.schemas.strict_model import MAX_PROMPT_IDS


class OpenAIServingTokenization(OpenAIServing):
    """Tokenization by the rules of the generating endpoints, with a limit of its own instead of the context's."""

    state_name = "serving_tokenization"

    async def tokenize(self, request: Request, body: TokenFields, headers: dict[str, str]) -> Response:
        """Return the ids of a text or of a conversation's prompt. Raises `RequestError`."""
        await self.check_model(body.model)
        ids, ignored = await TextPermits.of(request).run(request, partial(self._ids, body))
        self.held_by(request).add(BYTES_PER_VALUE * len(ids))
        headers = self.reported(request, ignored, headers)
        response: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self.max_len,
            "tokens": numbers(ids),
            "token_strs": StreamedList(self.tokenizer.token_text, ids, lambda _: 1) if body.return_token_strs else None,
        }
        return await whole_response(pieces_of(response), headers)

    async def detokenize(self, request: Request, body: DetokenizeRequest, headers: dict[str, str]) -> Response:
        """Return the text of ids, with special tokens by name. Raises `RequestError`."""
        await self.check_model(body.model)
        text = await TextPermits.of(request).run(request, partial(self._text, body.tokens))
        return await whole_response(pieces_of({"prompt": text}), headers)

    async def _text(self, ids: list[int]) -> str:
        await self.async_llm.input_processor.check_ids(ids, "tokens")
        return await self.tokenizer.atext(ids, self.tokenizer.special_ids, "tokens")

    async def _ids(self, body: TokenFields) -> tuple[Sequence[int], tuple[str, ...]]:
        """Return the token ids, and the fields that have no effect on them."""
        if isinstance(body, TokenizeRequest):
            return await self._encode(body.prompt, "prompt", body.add_special_tokens is not False), ()
        prompt = await render_prompt(self.tokenizer, as_chat(body))
        return await self._encode(prompt.text, "messages", False), prompt.ignored

    async def _encode(self, text: str, param: str, marks: bool) -> Sequence[int]:
        """Return the ids of a text, which may be longer than the context but not longer than a request may be."""
        try:
            # Until the response has been read, an array takes a tenth of the memory of a list.
            return array("i", await self.tokenizer.aencode(text, marks, most=MAX_PROMPT_IDS, param=param))
        except TooManyTokensError as error:
            message = f"'{param}' has at least {error.at_least} tokens; at most {MAX_PROMPT_IDS} are listed. Send less."
            raise RequestError(message, param) from None


router = APIRouter(route_class=ErrorHandlingRoute)
_TOKENIZE = describe(
    "Tokenize text",
    "Tokens",
    bodies=("TokenizeRequest", "TokenizeChatRequest"),
    examples={
        "text": {"prompt": "def add(a, b):", "return_token_strs": True},
        "conversation": {"messages": [{"role": "user", "content": "Hi"}]},
    },
    example_response={"count": 2, "max_model_len": 4096, "tokens": [17, 42], "token_strs": ["def", " add"]},
)
_DETOKENIZE = describe(
    "Detokenize token ids",
    "Text",
    bodies=("DetokenizeRequest",),
    examples={"ids": {"tokens": [17, 42]}},
    example_response={"prompt": "def add"},
)


@router.post("/tokenize", openapi_extra=_TOKENIZE)
@router.post("/v1/tokenize", openapi_extra=_TOKENIZE)
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    serving = OpenAIServingTokenization.of(request)
    body, headers = await serving.read(request, TokenizeRequest, TokenizeChatRequest)
    return await serving.tokenize(request, body, headers)


@router.post("/detokenize", openapi_extra=_DETOKENIZE)
@router.post("/v1/detokenize", openapi_extra=_DETOKENIZE)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    serving = OpenAIServingTokenization.of(request)
    body, headers = await serving.read(request, DetokenizeRequest)
    return await serving.detokenize(request, body, headers)
