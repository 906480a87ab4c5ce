"""A request of `/v1/messages` as one chat turn: the same prompt, grammar and tool parsers serve both."""

from collections.abc import Iterable
from typing import Any

from pydantic import PrivateAttr, ValidationError

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.chat.schema import CalledFunction, ChatMessage, ChatRequest, ToolCall
from oarlock.server.endpoints.messages.schema import (
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
from oarlock.server.endpoints.schema import SamplingFields
from oarlock.server.http.request_body import request_error, with_fields_renamed
from oarlock.server.json_text import dumps
from oarlock.server.strict_model import FieldError

Source = MessagesRequest | CountTokensRequest
# Fields of a chat turn, and those that they come from.
_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
    "parallel_tool_calls": "tool_choice",
}
_OWN = {"metadata", "service_tier", "response_format"}  # that mean something else there
_MODES = {"auto": "auto", "any": "required", "none": "none"}
_FAILED = "Error: "  # before the result of a tool that failed: templates have no other place for that


class MessagesTurn(ChatRequest):
    """A chat turn that a request of `/v1/messages` became."""

    _source: Source = PrivateAttr()

    @property
    def source(self) -> Source:
        """The request."""
        return self._source

    @property
    def limit_field(self) -> str:
        return "max_tokens"


def turn_of(request: Source) -> MessagesTurn:
    """The chat turn of a request. Raises `RequestError`."""
    given = (SamplingFields.model_fields.keys() & request.model_fields_set) - _OWN
    values: dict[str, Any] = {name: getattr(request, name) for name in given}
    try:
        values["messages"] = _messages(request)
        values |= _others(request)
        turn = MessagesTurn.model_validate(values, strict=False)  # each value was checked
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
    """The members that have other names or places."""
    thinking = request.thinking
    found: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": thinking is not None and thinking.is_on}}
    if isinstance(request, MessagesRequest):
        found["max_completion_tokens"] = request.max_tokens
        found["stop"] = request.stop_sequences or []
        found["user"] = request.metadata and request.metadata.user_id
    if request.tools:
        found["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in request.tools
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
        found["reasoning_effort"] = "xhigh" if config.effort == "max" else config.effort
    last = request.messages[-1]
    if last.role == "assistant" and text_of([block for block in last.blocks if isinstance(block, TextBlock)]):
        found["continue_final_message"] = True
    return found


def _messages(request: Source) -> list[ChatMessage]:
    """Turns become messages. Results of tools are messages of their own, before the words of the user beside them; one
    speaker's turns in a row are one, as the API has it. Raises `FieldError`."""
    system = text_of(request.system)
    messages = [_message("system", system)] if system else []
    for turn in request.messages:
        if turn.role == "system":
            _say(messages, "system", _text(turn.blocks, "system"))
        elif turn.role == "assistant":
            _add_answer(messages, turn)
        else:
            results = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
            messages += [_result(block) for block in results]
            rest = [block for block in turn.blocks if not isinstance(block, ToolResultBlock)]
            if rest or not results:
                _say(messages, "user", _text(rest, "user"))
    return messages


def _message(role: str, content: str | None) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content)


def _say(messages: list[ChatMessage], role: str, text: str) -> None:
    if messages and messages[-1].role == role:
        messages[-1] = _message(role, f"{messages[-1].text}\n\n{text}")
    else:
        messages.append(_message(role, text))


def _text(blocks: Iterable[Any], role: str) -> str:
    """Raises `FieldError` for blocks that only an assistant has."""
    blocks = list(blocks)
    wrong = next((block for block in blocks if not isinstance(block, TextBlock)), None)
    if wrong is not None:
        raise FieldError("messages", f"holds a block of type '{wrong.type}' in a message of the role '{role}'")
    return text_of(blocks)


def _result(block: ToolResultBlock) -> ChatMessage:
    text = text_of(block.content)
    content = f"{_FAILED}{text}" if block.is_error else text
    return ChatMessage.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id)


def _add_answer(messages: list[ChatMessage], turn: InputMessage) -> None:
    """An assistant's blocks as one message, added to the one before if that is the assistant's, too."""
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
