"""`/v1/responses/compact`: a summary by the model replaces a conversation, except the user's and system's messages.

A request for a summary is a chat turn like any other: the conversation, and a request for a summary as the user's last
turn. The response keeps the user's and the system's messages word for word, and has the summary in an item of type
`compaction`, which later requests send back.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oarlock.engine.errors import ContextLengthError, RequestError, UnavailableError
from oarlock.server.chat.message_parser import MessageShape
from oarlock.server.endpoints.chat.serving import ProcessedChat
from oarlock.server.endpoints.responses.translate import Item, ResponsesTurn, ResponsesWriter, turn_of
from oarlock.server.errors import HttpError
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import ABORT, TIMEOUT
from oarlock.server.schemas.response_items import SUMMARY, MessageItem, sealed, text_of
from oarlock.server.schemas.responses import CompactRequest, Reasoning, ResponsesRequest

# The user's last turn. It limits the length in words, so that few summaries reach the limit in tokens.
_QUESTION = (
    "Summarise our conversation so far for someone who continues it and reads only my messages and your summary. Keep "
    "the task, decisions, facts, names, paths, results of tools and open steps; the most important first. Write only "
    "the summary, in at most 600 words, in the language of the conversation."
)
MAX_TOKENS = 4096  # limit of a summary, including reasoning that a template cannot switch off
# Least room for a summary: this number of tokens, or 1/16 of a context if that is smaller.
_LEAST_TOKENS, _LEAST_SHARE = 256, 16
_CUT = "\n\n(The summary was cut short here.)"
_NAMED = ("timeout", "priority", "cache_salt", "user")  # fields that mean the same for any response


class SummaryTurn(ResponsesTurn):
    """A chat turn that asks for a summary."""

    @property
    def conversation(self) -> tuple[Item, ...]:
        """The conversation that is summarised."""
        return self.items[:-1]


def summary_turn(body: CompactRequest, conversation: Sequence[Item], owner: str) -> SummaryTurn:
    """Return the chat turn that asks for a summary of `conversation`. Raises `RequestError`."""
    if not conversation:
        message = "'input' contains nothing that this server reads, so there is no conversation to compact."
        raise RequestError(message, "input")
    request = ResponsesRequest(
        model=body.model,
        input=_QUESTION,
        instructions=body.instructions,
        reasoning=Reasoning(effort="none"),
        **{name: getattr(body, name) for name in _NAMED},
    )
    question = MessageItem(role="user", content=_QUESTION)
    return turn_of(request, [*conversation, question], owner, SummaryTurn)


def bounded(processed: ProcessedChat, max_len: int) -> ProcessedChat:
    """Limit the tokens of a summary. Raises `ContextLengthError` if the conversation leaves too few.

    `max_len`: tokens of the context. If the template cannot switch reasoning off, this is not reported as an ignored
    field, because the client did not set it.
    """
    (choice,) = processed.choices
    request = choice.request
    num_prompt, least = len(request.prompt_token_ids), min(_LEAST_TOKENS, max_len // _LEAST_SHARE)
    if num_prompt + least > max_len:
        raise ContextLengthError(
            f"This model's context holds {max_len} tokens. The conversation and the request for a summary "
            f"have {num_prompt} tokens, and a summary needs at least {least}. Remove at least "
            f"{num_prompt + least - max_len} tokens from 'input'.",
            "input",
        )
    limit = min(request.params.max_tokens, MAX_TOKENS)
    choice.request = replace(request, params=replace(request.params, max_tokens=limit))
    return replace(processed, ignored=())


class CompactionWriter(ResponsesWriter):
    """Writer of the user's messages and the summary, as one `response.compaction`."""

    def __init__(
        self, response_id: str, generation: Generation, shape: MessageShape, conversation: Sequence[Item]
    ) -> None:
        fields = {"id": response_id, "object": "response.compaction", "created_at": int(time.time())}
        super().__init__(fields, generation, shape, None, lambda response: None, {}, with_encrypted=False)
        self._conversation = conversation

    def _ended(self) -> dict[str, Any]:
        reason = None if self._last is None else self._last.finish_reason
        if reason == TIMEOUT:  # the client keeps its conversation instead of half a summary
            message = "The summary was not complete within the time limit of the request."
            raise HttpError(408, message, param="timeout", code="timeout", headers={"x-should-retry": "false"})
        if reason == ABORT:
            message = "An operator aborted this request before it was complete. It can be sent again."
            raise UnavailableError(message, "aborted")
        parts = [part for item in self._items.items if item["type"] == "message" for part in item["content"]]
        summary = "".join(part["text"] for part in parts).strip()
        if not summary:
            message = "The model wrote no summary of this conversation. Send it again, or another 'input'."
            raise HttpError(400, message, param="input", code="no_summary")
        status, why = self._end
        is_cut = status == "incomplete"
        sealed_summary = sealed(summary + _CUT if is_cut else summary, SUMMARY)
        item = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction", "encrypted_content": sealed_summary}
        response = self._fields | {"output": [*_kept(self._conversation), item], "usage": self._usage()}
        return response | ({"incomplete_details": {"reason": why}} if is_cut else {})


def _kept(conversation: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages that stay: the user's, as in OpenAI's API, and instructions, which a summary could change."""
    return [
        {
            "id": item.id or f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "completed",
            "role": item.role,
            "content": [{"type": "input_text", "text": text_of(item.content)}],
        }
        for item in conversation
        if isinstance(item, MessageItem) and item.role != "assistant"
    ]
