"""Translation of `/v1/messages` requests into chat turns, and of the results into messages and their streams.

Both APIs share the prompt, grammar and tool parsers. On the wire, a response is a `message` object, or its events.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import PrivateAttr, ValidationError
from pydantic_core import from_json

from oarlock.engine.errors import RequestError
from oarlock.server.chat.message_parser import MessageShape
from oarlock.server.endpoints.streamed_items import Event, ItemKind, ItemsWriter, StreamedItems
from oarlock.server.errors import HttpError, message_error
from oarlock.server.http.request_body import request_error, with_fields_renamed
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import ABORT, TIMEOUT
from oarlock.server.schemas.chat import CalledFunction, ChatMessage, ChatRequest, ToolCall
from oarlock.server.schemas.generation import SamplingFields
from oarlock.server.schemas.messages import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    NamedTool,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from oarlock.server.schemas.strict_model import FieldError

Source = MessagesRequest | CountTokensRequest
# Field of a chat turn -> field of the request that it comes from.
_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
}
# Fields that mean something else in a request of /v1/messages.
_OWN = {"metadata", "service_tier", "response_format", "stream_options", "user"}
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header: [^\n]*\n?")
_FAILED = "Error: "  # prefix of the result of a failed tool, because templates have no field for the failure


class MessagesTurn(ChatRequest):
    """A chat turn made from a request of `/v1/messages`."""

    _source: Source = PrivateAttr()

    @property
    def source(self) -> Source:
        """The request."""
        return self._source

    def forget_inputs(self) -> None:
        super().forget_inputs()
        self._source.__dict__ |= dict.fromkeys(("messages", "system", "tools"))

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def thinking_switch(self) -> bool | None:
        """The value of `thinking`. Without it False, or None if the request sets an effort."""
        thinking = self._source.thinking
        if thinking is not None:
            return thinking.is_on
        return None if self.reasoning_effort is not None else False

    @property
    def sets_thinking(self) -> bool:
        return self._source.thinking is not None

    def name_of(self, field: str) -> str:
        return _FIELDS.get(field, field)


def turn_of(request: Source) -> MessagesTurn:
    """Return the chat turn of a request. Raises `RequestError`."""
    given = (SamplingFields.model_fields.keys() & request.model_fields_set) - _OWN
    values: dict[str, Any] = {name: getattr(request, name) for name in given}
    try:
        values["messages"] = _messages(request)
        values |= _others(request)
        turn = MessagesTurn.model_validate(values, strict=False)  # each value was checked already
    except ValidationError as error:
        raise renamed(request_error(error)) from None
    except FieldError as error:
        raise RequestError(str(error), error.param) from None
    turn._source = request
    return turn


def renamed(error: RequestError) -> RequestError:
    """Rewrite an error about a chat turn to name the fields of `/v1/messages`."""
    return with_fields_renamed(error, _FIELDS)


def _others(request: Source) -> dict[str, Any]:
    """Return the members of the chat turn that have another name or position in the request."""
    found: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        found["max_completion_tokens"] = request.max_tokens
        found["stop"] = request.stop_sequences or []
        found["user"] = (request.metadata and request.metadata.user_id) or request.user
    if request.own_tools:
        found["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in request.own_tools
        ]
    if (choice := request.tool_choice) is not None:
        named = isinstance(choice, NamedTool)
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else _MODES[choice.type]
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    config = request.output_config
    if config is not None and config.format is not None:
        form = {"name": "answer", "schema": config.format.schema_}
        found["response_format"] = {"type": "json_schema", "json_schema": form}
    if config is not None and config.effort is not None:
        found["reasoning_effort"] = config.effort
    last = request.messages[-1]
    if last.role == "assistant" and text_of([block for block in last.blocks if isinstance(block, TextBlock)]):
        found["continue_final_message"] = True
    return found


def _messages(request: Source) -> list[ChatMessage]:
    """Return the messages of a conversation. Raises `FieldError`.

    Tool results become separate messages, before the user's text in the same turn. Consecutive turns of the same role
    are joined, as in Anthropic's API.
    """
    system = _system(request.system)
    messages = [_message("system", system)] if system else []
    for turn in request.messages:
        if turn.role == "system":
            _append_message(messages, "system", _text(turn.blocks, "system"))
        elif turn.role == "assistant":
            _add_assistant_turn(messages, turn)
        else:
            results = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
            messages += [_result(block) for block in results]
            rest = [block for block in turn.blocks if not isinstance(block, ToolResultBlock)]
            if rest or not results:
                _append_message(messages, "user", _text(rest, "user"))
    return messages


def _system(content: str | list[Any] | None) -> str:
    """Return the system prompt without the billing line that Claude Code writes first.

    The line differs in each run of that client, so no run would find the prompt of another in the prefix cache.
    """
    if not content:
        return ""
    if isinstance(content, str):
        return _BILLING_LINE.sub("", content, count=1)
    return _BILLING_LINE.sub("", content[0].text, count=1) + text_of(content[1:])


def _message(role: str, content: str | None) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content)


def _append_message(messages: list[ChatMessage], role: str, text: str) -> None:
    if messages and messages[-1].role == role:
        messages[-1] = _message(role, f"{messages[-1].text}\n\n{text}")
    else:
        messages.append(_message(role, text))


def _text(blocks: Iterable[Any], role: str) -> str:
    """Return the joined text of blocks. Raises `FieldError` for blocks that only an assistant may have."""
    blocks = list(blocks)
    wrong = next((block for block in blocks if not isinstance(block, TextBlock)), None)
    if wrong is not None:
        raise FieldError("messages", f"holds a block of type '{wrong.type}' in a message of the role '{role}'")
    return text_of(blocks)


def _result(block: ToolResultBlock) -> ChatMessage:
    text = text_of(block.content)
    content = f"{_FAILED}{text}" if block.is_error else text
    return ChatMessage.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id)


def _add_assistant_turn(messages: list[ChatMessage], turn: InputMessage) -> None:
    """Add an assistant's blocks as one message, or to the previous message if that is also the assistant's."""
    answer = messages[-1] if messages and messages[-1].role == "assistant" else None
    if answer is None:
        answer = _message("assistant", None)
        messages.append(answer)
    for block in turn.blocks:
        if isinstance(block, TextBlock):
            answer.content = answer.text + block.text
        elif isinstance(block, ThinkingBlock):
            answer.reasoning_content = (answer.reasoning_content or "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = CalledFunction.model_construct(name=block.name, arguments=dumps(block.input))
            call = ToolCall.model_construct(id=block.id, type="function", function=function)
            answer.tool_calls = [*(answer.tool_calls or ()), call]
        elif not isinstance(block, RedactedThinkingBlock):
            raise FieldError("messages", f"holds a block of type '{block.type}' in a message of the role 'assistant'")
    if answer.content is None and not answer.tool_calls and answer.reasoning_content is None:
        answer.content = ""


# Clients return reasoning with this signature. It is not checked, because reasoning is text that they can see.
SIGNATURE = "oarlock"


class ContentBlocks(StreamedItems):
    """Content blocks: `text`, `thinking` and `tool_use`."""

    shows_nothing = False

    def __init__(self, *, shows_reasoning: bool) -> None:
        """Show reasoning if `shows_reasoning` is true, else leave its blocks empty."""
        super().__init__()
        self._shows_reasoning = shows_reasoning

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.items)

    def _begun(self, kind: ItemKind, name: str) -> Iterator[Event]:
        if kind is ItemKind.TEXT:
            block: dict[str, Any] = {"type": "text", "text": ""}
        elif kind is ItemKind.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
        self.items.append(block)
        yield "content_block_start", {"index": self._index, "content_block": dict(block)}

    def _grown(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        if self._open is ItemKind.TEXT:
            delta = {"type": "text_delta", "text": text}
        elif self._open is ItemKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif self._shows_reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            return
        yield "content_block_delta", {"index": self._index, "delta": delta}

    def _ended(self, text: str, status: str) -> Iterator[Event]:
        block = self.items[-1]
        if self._open is ItemKind.TEXT:
            block["text"] = text
        elif self._open is ItemKind.CALL:
            block["input"] = _object(text)
        else:
            block["thinking"] = text if self._shows_reasoning else ""
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield "content_block_delta", {"index": self._index, "delta": delta}
        yield "content_block_stop", {"index": self._index}


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or their readable part if the call was cut short or is malformed."""
    try:
        value = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_PAUSED = (TIMEOUT, ABORT)  # the client may send the partial response back to have it continued


class MessagesWriter(ItemsWriter):
    """Writer of one message, whole or as events."""

    def __init__(
        self,
        request_id: str,
        model: str,
        generation: Generation,
        shape: MessageShape,
        *,
        context: int,
        shows_reasoning: bool,
    ) -> None:
        """Begin a message. `context`: largest number of tokens of prompt and response together."""
        self._blocks = ContentBlocks(shows_reasoning=shows_reasoning)
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
        """Return the reason for which the message ended."""
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
        """Return the usage as the API counts it: input tokens do not include cached tokens."""
        cached = self._generation.cached_tokens
        return {
            "input_tokens": self._generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_tokens},
            "service_tier": "standard",
        }
