"""A request of `/v1/responses` as one chat turn: the same prompt, grammar and tool parsers serve both."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import PrivateAttr, ValidationError

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.chat.schema import CalledFunction, ChatMessage, ChatRequest, ToolCall
from oarlock.server.endpoints.responses.schema import (
    ChosenTool,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponsesAllowedTools,
    ResponsesRequest,
    ToolChoice,
    text_of,
)
from oarlock.server.endpoints.schema import SamplingFields
from oarlock.server.http.request_body import request_error, with_fields_renamed
from oarlock.server.strict_model import FieldError

Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
# Fields of a chat turn, and those that they come from.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class ResponsesTurn(ChatRequest):
    """A chat turn that a request of `/v1/responses` became."""

    _source: ResponsesRequest = PrivateAttr()
    _items: tuple[Item, ...] = PrivateAttr()
    _owner: str = PrivateAttr()

    @property
    def source(self) -> ResponsesRequest:
        """The request."""
        return self._source

    @property
    def items(self) -> tuple[Item, ...]:
        """The whole conversation before the answer, without instructions."""
        return self._items

    @property
    def owner(self) -> str:
        """Label of the API key whose responses these are; others do not see them."""
        return self._owner

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"


def turn_of(request: ResponsesRequest, items: Sequence[Item], owner: str) -> ResponsesTurn:
    """The chat turn of a request of `owner` whose conversation is `items`. Raises `RequestError`."""
    given = SamplingFields.model_fields.keys() & request.model_fields_set
    values: dict[str, Any] = {name: getattr(request, name) for name in given}
    try:
        values["messages"] = _messages(request.instructions, items)
        values |= _others(request)
        turn = ResponsesTurn.model_validate(values, strict=False)  # each value was checked
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
    """The members that have other names or places."""
    found: dict[str, Any] = {"parallel_tool_calls": request.parallel_tool_calls}
    if request.max_output_tokens is not None:
        found["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        found["tools"] = [
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters", "strict"})}
            for tool in request.tools
        ]
    if request.tool_choice is not None:
        found["tool_choice"] = _choice(request.tool_choice)
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


def _choice(choice: ToolChoice) -> Any:
    if isinstance(choice, ChosenTool):
        return _named(choice)
    if isinstance(choice, ResponsesAllowedTools):
        tools = [_named(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _named(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _messages(instructions: str | None, items: Iterable[Item]) -> list[ChatMessage]:
    """Items become turns: thoughts, text and calls of one answer are one assistant's message; instructions and the
    system's first words are one, since templates take no second system message. Raises `FieldError`."""
    messages = [] if instructions is None else [_message("system", instructions)]
    answer: ChatMessage | None = None  # the assistant's message that items are still added to
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            messages.append(ChatMessage.model_construct(role="tool", content=_text(item), tool_call_id=item.call_id))
            answer = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            text = _text(item)
            only = messages[0] if len(messages) == 1 and instructions is not None else None
            if only is not None and only.role == "system" and item.role in ("system", "developer"):
                messages[0] = _message("system", f"{only.text}\n\n{text}")
            else:
                messages.append(_message(item.role, text))
            answer = None
        else:
            if answer is None or not _goes_into(item, answer):
                answer = _message("assistant", None)
                messages.append(answer)
            _add(item, answer)
    return messages


def _message(role: str, content: str | None) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content)


def _text(item: MessageItem | FunctionCallOutputItem) -> str:
    return text_of(item.content if isinstance(item, MessageItem) else item.output)


def _goes_into(item: Item, answer: ChatMessage) -> bool:
    """Whether an assistant's item belongs to the message so far: thoughts, then text, then calls."""
    return isinstance(item, FunctionCallItem) or (answer.content is None and not answer.tool_calls)


def _add(item: Item, answer: ChatMessage) -> None:
    if isinstance(item, FunctionCallItem):
        function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        answer.tool_calls = [*(answer.tool_calls or ()), call]
    elif isinstance(item, ReasoningItem):
        answer.reasoning_content = (answer.reasoning_content or "") + item.text
    elif isinstance(item, MessageItem):
        answer.content = _text(item)
