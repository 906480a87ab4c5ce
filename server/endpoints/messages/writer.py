"""Messages and their streams on the wire: a `message` object, or events that build one up."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from oarlock.server.chat.message_parser import AnswerShape
from oarlock.server.endpoints.streamed_items import Event, ItemsWriter, Kind, StreamedItems
from oarlock.server.errors import HttpError, message_error
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import ABORT, TIMEOUT

# Clients hand a thought back with what stands here. Nothing is checked then: thoughts are text that they can see.
SIGNATURE = "oarlock"


class ContentBlocks(StreamedItems):
    """Content blocks: `text`, `thinking` and `tool_use`."""

    shows_nothing = False

    def __init__(self, *, shows_thoughts: bool) -> None:
        """`shows_thoughts`: else blocks of thoughts are empty."""
        super().__init__()
        self._shows_thoughts = shows_thoughts

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.items)

    def _begun(self, kind: Kind, name: str) -> Iterator[Event]:
        if kind is Kind.TEXT:
            block: dict[str, Any] = {"type": "text", "text": ""}
        elif kind is Kind.THOUGHTS:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
        self.items.append(block)
        yield "content_block_start", {"index": self._index, "content_block": dict(block)}

    def _grown(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        if self._open is Kind.TEXT:
            delta = {"type": "text_delta", "text": text}
        elif self._open is Kind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif self._shows_thoughts:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            return
        yield "content_block_delta", {"index": self._index, "delta": delta}

    def _ended(self, text: str, status: str) -> Iterator[Event]:
        block = self.items[-1]
        if self._open is Kind.TEXT:
            block["text"] = text
        elif self._open is Kind.CALL:
            block["input"] = _object(text)
        else:
            block["thinking"] = text if self._shows_thoughts else ""
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield "content_block_delta", {"index": self._index, "delta": delta}
        yield "content_block_stop", {"index": self._index}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut short or written wrongly, what of it can be read."""
    try:
        value = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_PAUSED = (TIMEOUT, ABORT)  # the client may send the answer so far and go on


class MessagesWriter(ItemsWriter):
    """One message, whole or as events."""

    def __init__(
        self,
        request_id: str,
        model: str,
        generation: Generation,
        shape: AnswerShape,
        *,
        context: int,
        shows_thoughts: bool,
    ) -> None:
        """`context`: tokens of prompt and answer together, at most."""
        self._blocks = ContentBlocks(shows_thoughts=shows_thoughts)
        self._request_id, self._model, self._context = request_id, model, context
        super().__init__(generation, shape, self._blocks)

    @property
    def response_id(self) -> str:
        return f"msg_{self._request_id}"

    def opening(self, num_choices: int) -> Iterable[bytes]:
        message = self._message() | {"stop_reason": None, "stop_sequence": None, "content": []}
        return [self._event("message_start", {"message": message}), self._event("ping", {})]

    def closing(self, generation: Generation) -> Iterable[bytes]:
        for event in self._end_items():
            yield self._event(*event)
        yield self._event("message_delta", {"delta": self._end(), "usage": self._usage()})
        yield self._event("message_stop", {})

    def failure(self, error: HttpError) -> bytes:
        data = message_error(error, self._request_id)
        return f"event: error\ndata: {dumps(data)}\n\n".encode()

    def _ended(self) -> dict[str, Any]:
        return self._message() | self._end()

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.items,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, Any]:
        """Why the message ended."""
        assert self._last is not None, "the answer has ended"
        sequence = self._last.stop_reason if isinstance(self._last.stop_reason, str) else None
        if self._last.finish_reason in _PAUSED:
            reason = "pause_turn"
        elif self._last.finish_reason == "length":
            taken = self._generation.prompt_tokens + self._generation.completion_tokens
            reason = "model_context_window_exceeded" if taken >= self._context else "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """As the API counts: input tokens are those that were not cached."""
        cached = self._generation.cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens},
            "service_tier": "standard",
        }
