"""Translation of `/v1/responses` requests into chat turns, and of the results into responses and their streams.

Both APIs share the prompt, grammar and tool parsers. On the wire, a response is a `response` object, or numbered events
that end with such an object.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import PrivateAttr, ValidationError

from oarlock.engine.errors import RequestError
from oarlock.server.chat.message_parser import MessageShape
from oarlock.server.chat.visible_tokens import VisibleTokens
from oarlock.server.endpoints.streamed_items import Event, ItemKind, ItemsWriter, StreamedItems
from oarlock.server.errors import HttpError, error_object
from oarlock.server.http.request_body import request_error, with_fields_renamed
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import ABORT, TIMEOUT, Delta, TokenScore
from oarlock.server.schemas.chat import CalledFunction, ChatMessage, ChatRequest, ToolCall
from oarlock.server.schemas.generation import SamplingFields
from oarlock.server.schemas.response_items import (
    REASONING,
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    sealed,
    text_of,
)
from oarlock.server.schemas.responses import (
    ChosenTool,
    FunctionTool,
    ResponsesAllowedTools,
    ResponsesRequest,
    ToolChoice,
)
from oarlock.server.schemas.strict_model import FieldError

Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | CompactionItem
Functions = Mapping[str, tuple[FunctionTool, str | None]]  # name for the model -> function, and its namespace
# Beginning of the turn that shows the model a summary.
_SUMMARY_HEAD = "This is a summary of our conversation up to this point:\n\n"
_OF_FUNCTION = {"description", "parameters", "strict"}
# Field of a chat turn -> field of the request that it comes from.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesTurn(ChatRequest):
    """A chat turn made from a request of `/v1/responses`."""

    _source: ResponsesRequest = PrivateAttr()
    _items: tuple[Item, ...] = PrivateAttr()
    _owner: str = PrivateAttr()

    @property
    def source(self) -> ResponsesRequest:
        """The request."""
        return self._source

    @property
    def items(self) -> tuple[Item, ...]:
        """The whole conversation before the response, without instructions."""
        return self._items

    @property
    def owner(self) -> str:
        """Salt of the API key that the responses belong to. Other keys do not see them."""
        return self._owner

    def kept_bytes(self, num_bytes: int) -> int:
        """Return all bytes: the items are stored with the response, which also shows other fields of the request."""
        return num_bytes

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    def name_of(self, field: str) -> str:
        return _FIELDS.get(field, field)


_TurnT = TypeVar("_TurnT", bound=ResponsesTurn)


def turn_of(request: ResponsesRequest, items: Sequence[Item], owner: str, kind: type[_TurnT]) -> _TurnT:
    """Return the chat turn of `owner`'s request, of class `kind`, with the conversation `items`. Raises
    `RequestError`.
    """
    given = SamplingFields.model_fields.keys() & request.model_fields_set
    values: dict[str, Any] = {name: getattr(request, name) for name in given}
    try:
        values["messages"] = _messages(request.instructions, items)
        values |= _others(request)
        turn = kind.model_validate(values, strict=False)  # each value was checked already
    except ValidationError as error:
        raise renamed(request_error(error)) from None
    except FieldError as error:
        raise RequestError(str(error), error.param) from None
    turn._source, turn._items, turn._owner = request, tuple(items), owner
    return turn


def renamed(error: RequestError) -> RequestError:
    """Rewrite an error about a chat turn to name the fields of `/v1/responses`."""
    return with_fields_renamed(error, _FIELDS)


def _others(request: ResponsesRequest) -> dict[str, Any]:
    """Return the members of the chat turn that have another name or position in the request."""
    found: dict[str, Any] = {"parallel_tool_calls": request.parallel_tool_calls}
    if request.max_output_tokens is not None:
        found["max_completion_tokens"] = request.max_output_tokens
    functions = request.functions
    if functions:
        found["tools"] = [
            {"type": "function", "function": tool.model_dump(include=_OF_FUNCTION) | {"name": name}}
            for name, (tool, _) in functions.items()
        ]
    if request.tool_choice is not None:
        found["tool_choice"] = _choice(request.tool_choice, functions)
    if request.text is not None and request.text.format is not None:
        form = request.text.format
        named = {"json_schema": {"name": form.name, "schema": form.schema_}} if form.type == "json_schema" else {}
        found["response_format"] = {"type": form.type, **named}
    if request.reasoning is not None and request.reasoning.effort is not None:
        found["reasoning_effort"] = request.reasoning.effort
    if request.chat_template_kwargs is not None:
        found["chat_template_kwargs"] = request.chat_template_kwargs
    if request.with_logprobs:
        found |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return found


def _choice(choice: ToolChoice, functions: Functions) -> Any:
    if isinstance(choice, ChosenTool):
        return _named(choice.name, functions)
    if isinstance(choice, ResponsesAllowedTools):
        tools = [_named(name, functions) for name in choice.names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}} if tools else "none"
    return choice


def _named(name: str, functions: Functions) -> dict[str, Any]:
    """Return a choice of a function by its full name, or by its name in a namespace if that name is unique."""
    if name not in functions:
        others = [flat for flat, (tool, space) in functions.items() if space is not None and tool.name == name]
        name = others[0] if len(others) == 1 else name
    return {"type": "function", "function": {"name": name}}


def _messages(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Return the items as messages. Raises `FieldError`.

    The reasoning, text and calls of one response become one assistant's message. Instructions and a system message that
    follows them become one message, because templates accept no second system message.
    """
    messages = [] if instructions is None else [_message("system", instructions)]
    assistant: ChatMessage | None = None  # the assistant's message that items are still added to
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append(ChatMessage.model_construct(role="tool", content=_text(item), tool_call_id=item.call_id))
            assistant = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            text = _text(item)
            only = messages[0] if len(messages) == 1 and instructions is not None else None
            if only is not None and only.role == "system" and item.role in ("system", "developer"):
                messages[0] = _message("system", f"{only.text}\n\n{text}")
            else:
                messages.append(_message(item.role, text))
            assistant = None
        elif isinstance(item, CompactionItem):
            # The summary is a user's turn, because every template shows one at any position, and the model responds to
            # it if it comes last.
            messages.append(_message("user", _SUMMARY_HEAD + item.text))
            assistant = None
        else:
            if assistant is None or not _can_join(item, assistant):
                assistant = _message("assistant", None)
                messages.append(assistant)
            _add(item, assistant)
    return messages


def _message(role: str, content: str | None) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content)


def _text(item: MessageItem | FunctionCallOutputItem) -> str:
    return text_of(item.content if isinstance(item, MessageItem) else item.output)


def _can_join(item: Item, assistant: ChatMessage) -> bool:
    """Return whether an assistant's item belongs to the message so far: reasoning, then text, then calls."""
    return isinstance(item, FunctionCallItem) or (assistant.content is None and not assistant.tool_calls)


def _add(item: Item, assistant: ChatMessage) -> None:
    if isinstance(item, FunctionCallItem):
        function = CalledFunction.model_construct(name=item.flat_name, arguments=item.arguments)
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        assistant.tool_calls = [*(assistant.tool_calls or ()), call]
    elif isinstance(item, ReasoningItem):
        assistant.reasoning_content = (assistant.reasoning_content or "") + item.text
    elif isinstance(item, MessageItem):
        assistant.content = _text(item)


class OutputItems(StreamedItems):
    """Output items: reasoning (`reasoning`), text (`message`) and calls (`function_call`)."""

    shows_nothing = True

    def __init__(self, functions: Functions, *, with_encrypted: bool) -> None:
        """Use the request's `functions`. `with_encrypted`: repeat reasoning as `encrypted_content`, for clients to send
        back.
        """
        super().__init__()
        self._functions = functions
        self._with_encrypted = with_encrypted
        self._logprobs: list[dict[str, Any]] = []  # logprobs of the open item

    @property
    def _at(self) -> dict[str, Any]:
        """The members that every event of the open item's content has."""
        return {"item_id": self.items[-1]["id"], "output_index": self._index}

    def _begun(self, kind: ItemKind, name: str) -> Iterator[Event]:
        self._logprobs = []
        if kind is ItemKind.TEXT:
            item = {
                "id": _new_id("msg"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        elif kind is ItemKind.REASONING:
            item = {"id": _new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            tool, space = self._functions.get(name, (None, None))
            item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress"}
            item |= {"call_id": self._call_id or _new_id("call"), "name": name if tool is None else tool.name}
            item |= {"arguments": ""} if space is None else {"arguments": "", "namespace": space}
        self.items.append(item)
        yield "response.output_item.added", {"output_index": self._index, "item": dict(item)}
        if kind is not ItemKind.CALL:
            yield "response.content_part.added", {**self._at, "content_index": 0, "part": self._part()}

    def _grown(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        self._logprobs += logprobs
        if self._open is ItemKind.TEXT:
            members = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
            yield "response.output_text.delta", {**self._at, **members}
        elif self._open is ItemKind.REASONING:
            yield "response.reasoning_text.delta", {**self._at, "content_index": 0, "delta": text}
        else:
            yield "response.function_call_arguments.delta", {**self._at, "delta": text}

    def _ended(self, text: str, status: str) -> Iterator[Event]:
        item = self.items[-1]
        if self._open is ItemKind.CALL:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", {**self._at, **done}
        else:
            part = self._part(text)
            item["content"] = [part]
            if self._open is ItemKind.TEXT:
                done = {"text": text, "logprobs": self._logprobs}
                yield "response.output_text.done", {**self._at, "content_index": 0, **done}
            else:
                yield "response.reasoning_text.done", {**self._at, "content_index": 0, "text": text}
                if self._with_encrypted:
                    item["encrypted_content"] = sealed(text, REASONING)
            yield "response.content_part.done", {**self._at, "content_index": 0, "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": self._index, "item": dict(item)}

    def _part(self, text: str = "") -> dict[str, Any]:
        if self._open is ItemKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


# Finish reason -> status of the response, and the reason why it is incomplete.
_ENDS = {
    "length": ("incomplete", "max_output_tokens"),
    TIMEOUT: ("incomplete", "timeout"),
    ABORT: ("cancelled", None),
}


class ResponsesWriter(ItemsWriter):
    """Writer of one response, whole or as events."""

    def __init__(
        self,
        fields: dict[str, Any],
        generation: Generation,
        shape: MessageShape,
        entry: Callable[[TokenScore], dict[str, Any]] | None,
        on_end: Callable[[dict[str, Any]], None],
        functions: Functions,
        *,
        visible: VisibleTokens | None = None,
        with_encrypted: bool,
    ) -> None:
        """Begin a response. `fields`: the members of the response that the request decides.

        `entry`: converts a token's logprob to wire format; None: no logprobs. `on_end`: called with the complete
        response.
        """
        super().__init__(generation, shape, OutputItems(functions, with_encrypted=with_encrypted))
        self._fields = fields
        self._entry = entry
        self._visible = visible  # None: all tokens are visible text
        self._on_end = on_end
        self._number = 0  # number of the next event

    @property
    def response_id(self) -> str:
        return self._fields["id"]

    def opening(self, num_choices: int) -> Iterable[bytes]:
        response = self.response("in_progress")
        return [self._event(f"response.{kind}", {"response": response}) for kind in ("created", "in_progress")]

    def closing(self, generation: Generation) -> Iterable[bytes]:
        for event in self._end_items():
            yield self._event(*event)
        response = self._ended()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self._event(f"response.{kind}", {"response": response})

    def failure(self, error: HttpError) -> bytes:
        """Return the event of a failure. The items so far stay as they are."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if 400 <= error.status < 500 and error.status != 429:
            code = "invalid_prompt"
        response = self.response("failed") | {"error": {"code": code, "message": error_object(error)["message"]}}
        return self._event("response.failed", {"response": response})

    def abort(self) -> bool:
        """End the running generation. Return False if nothing was running."""
        return self._generation.abort()

    def response(self, status: str) -> dict[str, Any]:
        """Return the response in its current state."""
        ended = status != "in_progress"
        return self._fields | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": [dict(item) for item in self._items.items],
            "usage": self._usage() if ended else None,
        }

    def _push(self, delta: Delta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        if self._entry is None:
            return super()._push(delta)
        scores = delta.scores if self._visible is None else self._visible.push(delta.scores)
        return super()._push(delta, [self._entry(score) for score in scores])

    @property
    def _end(self) -> tuple[str, str | None]:
        reason = None if self._last is None else self._last.finish_reason
        return _ENDS.get(reason or "", ("completed", None))

    def _end_items(self) -> Iterator[Event]:
        return self._items.end("completed" if self._end[0] == "completed" else "incomplete")

    def _ended(self) -> dict[str, Any]:
        status, why = self._end
        response = self.response(status)
        if why is not None:
            response["incomplete_details"] = {"reason": why}
        self._on_end(response)
        return response

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._generation.prompt_tokens, self._generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": prompt + completion,
        }

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return super()._event(kind, {"sequence_number": number, **members})
