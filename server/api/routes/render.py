"""`POST /v1/completions/render`, `/v1/chat/completions/render`: what would be asked of the model, without asking it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.openapi.document import describe
from server.llm.async_llm import ProcessedRequest
from server.protocol.chat_completion import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.json_pieces import numbers, pieces_of
from server.serving.base import AnswerRoute, OpenAIServing
from server.serving.chat_plan import plan_chat
from server.serving.sse import until_disconnect, whole_response

router = APIRouter(route_class=AnswerRoute)
_COMPLETION = describe(
    "The prompt and the resolved parameters of a completion, without generating",
    "Rendered",
    bodies=("CompletionRequest",),
    examples={"plain": {"prompt": "def add(a, b):", "max_tokens": 20}},
)
_CHAT = describe(
    "The prompt and the resolved parameters of a chat turn, without generating",
    "Rendered",
    bodies=("ChatRequest",),
    examples={"plain": {"messages": [{"role": "user", "content": "Hi"}]}},
)


@router.post("/v1/completions/render", openapi_extra=_COMPLETION)
async def render_completion(request: Request) -> Response:
    serving = OpenAIServing.of(request)
    asked, headers = await serving.read(request, CompletionRequest)
    model = serving.check_model(asked.model)
    plan = await until_disconnect(request, serving.service.plan_completion(asked))
    return await _answer(serving, model, plan, asked.stops, headers)


@router.post("/v1/chat/completions/render", openapi_extra=_CHAT)
async def render_chat(request: Request) -> Response:
    serving = OpenAIServing.of(request)
    asked, headers = await serving.read(request, ChatRequest)
    model = serving.check_model(asked.model)
    chat = await until_disconnect(request, plan_chat(serving.service, asked))
    return await _answer(serving, model, chat.plan, asked.stops, headers)


async def _answer(
    serving: OpenAIServing, model: str, plan: ProcessedRequest, stops: list[str], headers: dict[str, str]
) -> Response:
    per_prompt = len(plan.choices) // plan.num_prompts
    prompts = []
    for choice in plan.choices[::per_prompt]:
        ids = choice.request.prompt_token_ids
        text = await serving.service.tokenizer.atext(ids)
        prompts.append({"text": text, "token_ids": numbers(ids), "num_tokens": len(ids)})
    first = plan.choices[0].request
    parameters: dict[str, Any] = asdict(first.params)
    parameters["seeds"] = [choice.request.params.seed for choice in plan.choices[:per_prompt]]
    del parameters["seed"]
    answer = {
        "object": "render",
        "model": model,
        "prompts": prompts,
        "choices_per_prompt": per_prompt,
        "max_model_len": serving.service.max_len,
        "parameters": parameters | {"stop": stops, "priority": first.priority, "timeout": plan.timeout_s},
    }
    return await whole_response(pieces_of(answer), headers)
