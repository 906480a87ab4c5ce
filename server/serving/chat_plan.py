"""A chat request becomes a plan: its prompt, what its answer may hold, and the grammar that the answer is bound to.

Knows conversations; the machinery of generation is `service`. Knows nothing of HTTP or of how the answer is written
down.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.chat.answer_grammar import answer_grammar
from server.chat.message_parser import AnswerShape
from server.chat.prompt import render_prompt
from server.chat.reasoning_parser import THINK_END, THINK_START
from server.llm.async_llm import AsyncLLM, ProcessedRequest
from server.llm.structured_output import constraint_of
from server.protocol.chat_completion import ChatRequest
from server.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The choices of one chat turn, ready to run, and how to read their text."""

    plan: ProcessedRequest
    shape: AnswerShape


async def plan_chat(service: AsyncLLM, request: ChatRequest) -> ChatPlan:
    """Everything that can be refused is refused here. Raises `RequestError`."""
    tokenizer = service.tokenizer

    async def encode(text: str) -> list[int]:
        return await service.encode(text, request, request.token_limit, "messages", False)

    prompt = await render_prompt(tokenizer, request, encode)
    service.check_ids(prompt.ids, "messages")
    names = prompt.tool_choice.format.delimiters if prompt.tool_choice else ()
    if prompt.may_think or prompt.is_thinking:
        names = (*names, THINK_START, THINK_END)
    marks = _special(tokenizer, names)
    plan = await service.plan(
        request,
        [prompt.ids],
        request.token_limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=answer_grammar(constraint_of(request), prompt, marks),
        shown=frozenset(marks.values()),
        param="messages",
    )
    return ChatPlan(plan, AnswerShape(prompt.may_think, prompt.is_thinking, prompt.tool_choice))


def _special(tokenizer: Tokenizer, marks: tuple[str, ...]) -> dict[str, int]:
    """The ids of those marks that are special tokens, which a text does not show by itself."""
    ids = {mark: tokenizer.backend.token_to_id(mark) for mark in marks}
    return {mark: token for mark, token in ids.items() if token is not None and token in tokenizer.special_ids}
