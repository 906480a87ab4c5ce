"""Conversion of a conversation into the messages that published chat templates expect."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.turn_folding import Folding
from oarlock.server.llm.chat_template import text_parts
from oarlock.server.schemas.chat import ChatMessage, ToolCall

Tools = list[dict[str, Any]]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # published templates read any of these keys
_SHORT_ID_SIZE = 9  # length in letters and digits


def template_messages(
    given: Sequence[ChatMessage],
    tools: Tools | None,
    tool_format: ToolFormat,
    folding: Folding,
    *,
    has_developer: bool,
) -> tuple[Messages, Tools | None]:
    """Return the messages and the value of the template's variable for the tools.

    `has_developer`: the template knows the role `developer`; otherwise such turns become system turns.
    """
    as_text = tool_format.text_arguments != folding.other_arguments
    messages = _messages(given, tool_format, as_text, has_developer)
    messages = folding.fold_calls(messages, tool_format.calls_as_text)
    messages, tools = tool_format.passed(messages, tools)
    messages = folding.fold_turns(messages)
    if tool_format.own_turns is not None:
        messages = tool_format.own_turns(messages)
    if tool_format is HARMONY:
        messages = [_with_one_text(message) for message in messages]
    return messages, tools


def in_parts(written: Messages, given: Sequence[ChatMessage]) -> Messages:
    """Convert each content to a list of parts: the caller's own parts if their text is unchanged, else one part."""
    sources = given if len(given) == len(written) else [None] * len(written)
    found = []
    for message, source in zip(written, sources, strict=True):
        texts = [message["content"]] if message["content"] else []
        if source is not None and isinstance(source.content, list) and source.text == message["content"]:
            texts = [part.text or part.refusal for part in source.content]
        found.append({**message, "content": text_parts(*texts)})
    return found


def _messages(given: Sequence[ChatMessage], tool_format: ToolFormat, as_text: bool, has_developer: bool) -> Messages:
    ids = _CallIds(tool_format)
    names: dict[str, str] = {}  # call id -> name of the function
    messages = []
    for message in given:
        role = "system" if message.role == "developer" and not has_developer else message.role
        written: dict[str, Any] = {"role": role, "content": message.text}
        name = message.name or names.get(message.tool_call_id or "")
        if name is not None:
            written["name"] = name
        if message.reasoning_text is not None and message.role == "assistant":
            written |= dict.fromkeys(REASONING_KEYS, message.reasoning_text)
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            written["tool_calls"] = [
                {
                    "id": ids.of_call(call),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, as_text)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            written["tool_call_id"] = ids.of_result(message.tool_call_id)
        messages.append(written)
    return messages


def _with_one_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Append the text before a call to the reasoning: Harmony's template accepts a single text, as reasoning."""
    reasoning_text, text = message.get(REASONING_KEYS[0]), message["content"]
    if not (message.get("tool_calls") and reasoning_text and text):
        return dict(message)
    return {**message, "content": "", **dict.fromkeys(REASONING_KEYS, f"{reasoning_text}\n{text}")}


def _arguments(text: str, as_text: bool) -> Any:
    """Return a call's arguments as an object, since most templates write the JSON themselves, or as text if invalid."""
    if as_text:
        return text or "{}"
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


class _CallIds:
    """Ids of calls and results in the notation of the format's templates, in the order of the conversation."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._known: dict[str, str] = {}  # call id -> id written for the latest call with this id
        self._num_calls = 0

    def of_call(self, call: ToolCall) -> str:
        make = self._format.call_id
        written = self._written(call.id) if make is None else make(call.function.name, self._num_calls)
        self._num_calls += 1
        self._known[call.id] = written
        return written

    def of_result(self, call_id: str) -> str:
        return self._known.get(call_id) or self._written(call_id)

    def _written(self, call_id: str) -> str:
        return _short(call_id) if self._format.short_call_ids else call_id


def _short(call_id: str) -> str:
    """Return a call id that Mistral's templates accept: the id itself if it is valid, otherwise its digest."""
    if len(call_id) == _SHORT_ID_SIZE and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_SHORT_ID_SIZE]
