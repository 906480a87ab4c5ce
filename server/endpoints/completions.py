"""`POST /v1/completions`, and `/v1/completions/render`, which returns only prompts and parameters."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.endpoints.generate import OpenAIServingGenerate
from oarlock.server.endpoints.response_writer import ResponseWriter, finite
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import json_text
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.input_processor import ProcessedRequest
from oarlock.server.llm.output_processor import Delta, TokenScore
from oarlock.server.schemas.generation import CompletionRequest


class OpenAIServingCompletion(OpenAIServingGenerate[CompletionRequest, ProcessedRequest]):
    """The completions endpoint."""

    state_name = "serving_completion"

    async def process(self, body: CompletionRequest) -> ProcessedRequest:
        return await self.async_llm.input_processor.process_completion(body)

    def _writer(
        self,
        body: CompletionRequest,
        processed: ProcessedRequest,
        generation: Generation,
        model: str,
        request_id: str,
    ) -> GenerationWriter:
        head = self._head(f"cmpl-{request_id}", "text_completion", model)
        return CompletionWriter(head, self.tokenizer, generation, self._options(body, body.logprobs))


class CompletionWriter(ResponseWriter):
    """Writer of `text_completion` objects."""

    def opening(self, num_choices: int) -> Iterable[bytes]:
        return ()

    def _piece(self, delta: Delta) -> str:
        return f'"text":{json_text(delta.text)}'

    def _choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _make_columns(self) -> dict[str, Callable[[TokenScore], Any]]:
        return {
            "tokens": lambda score: self._name(score.token_id),
            "token_logprobs": lambda score: None if score.logprob is None else finite(score.logprob),
            "top_logprobs": self._alternatives,
            "text_offset": lambda score: score.offset,
        }

    def _alternatives(self, score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        name = self._name
        entries = {name(token_id): finite(logprob) for token_id, logprob in score.top[: self._options.logprobs]}
        return entries | {name(score.token_id): finite(score.logprob)}


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


# The body is read raw and parsed strictly. The framework uses the schema only for the OpenAPI document.
@router.post("/v1/completions", openapi_extra=_OPENAPI)
async def create_completion(request: Request) -> Response:
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.create(request, body, headers)


@rendering.post("/v1/completions/render", openapi_extra=_RENDER)
async def render_completion(request: Request) -> Response:
    """Return the prompts and the resolved parameters of a completion, one object per prompt, without generating."""
    serving = OpenAIServingCompletion.of(request)
    body, headers = await serving.read(request, CompletionRequest)
    return await serving.render(request, body, headers, each=True)
