"""A list of call objects after a delimiter: `<|tool_call|>[{"name": …, "arguments": {…}}]`.

Granite 3, Phi-4-mini and older models of Mistral write it; newer models of Mistral write `[TOOL_CALLS]name[ARGS]{…}`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import (
    CallParser,
    CallReader,
    ContentDelta,
    MessageEvent,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

TOOL_CALL, TOOL_CALL_END, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["
_GRANITE_TEXT = "<tool_call>"  # Granite 3.1 writes this text instead of the token


class JsonListToolParser(ToolParser):
    """Parser of a list of calls after the delimiter, or of one call without brackets."""

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        # State between the delimiter and the call: takes the next character, returns False if it is invalid.
        self._accept: Callable[[str], bool] = self._head
        self._in_list = False

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        if delimiter in self.CLOSING:
            super()._on_delimiter(delimiter, events)
            return
        self._searching = False
        self._closers = []
        self._attempt = [delimiter]
        self._in_list = delimiter.endswith("[") and delimiter != "["
        self._accept = self._list if self._in_list else self._head

    def _reader(self, delimiter: str) -> CallReader:
        return CallParser(self._tools)

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        if self._call is not None:
            consumed = self._follow_call(self._call, character, events)
            if consumed and self._searching and self._sink is ContentDelta and self._in_list:
                self._searching = False
            return consumed
        if not self._accept(character):
            return self._abandon_call(events)
        if self._call is not None:
            return False  # the brace is the call's first character
        self._attempt.append(character)
        if self._searching:  # the list is closed: its brackets are not content
            self._attempt = []
        return True

    def _head(self, character: str) -> bool:
        if character == "[":
            self._in_list, self._accept = True, self._list
        elif character == "{":
            self._begin_call("".join(self._attempt), self._reader(character))
        return character.isspace() or character in "[{"

    def _list(self, character: str) -> bool:
        if character == "{":
            self._begin_call("".join(self._attempt), self._reader(character))
        elif character == "]":
            self._searching = True
        return character.isspace() or character in "{],"


class GraniteToolParser(JsonListToolParser):
    """Parser of Granite 3's lists, after the token or its older spelling."""

    DELIMITERS = (TOOL_CALL, _GRANITE_TEXT)


class Phi4MiniToolParser(JsonListToolParser):
    """Parser of Phi-4-mini's lists: between tokens, or after the word that its second template asks for."""

    DELIMITERS = (TOOL_CALL, TOOL_CALL_END, FUNCTOOLS)
    CLOSING = (TOOL_CALL_END,)


def forced_list(
    start: str, tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds, head: str = "[", end: str = ""
) -> str:
    """Return rules for forced calls as one list after `start`. `head`: its bracket, "" if `start` contains it."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    opening = f"{grammar.literal(head)} " if head else ""
    closing = f" {grammar.delimiter(end, special_ids)}" if end else ""
    rules = [f"calls: {grammar.delimiter(start, special_ids)} tail", f'tail: {opening}call{more} "]"{closing}']
    return "\n".join([*rules, *grammar.call_objects(tools, "arguments")])


def _write_into_messages(messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """Write the tools into the system message's `tools` text and calls into the content, as Phi-4-mini expects."""
    written = [_plain(message) for message in messages]
    if tools:
        text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        if written[0]["role"] != "system":
            written.insert(0, {"role": "system", "content": ""})
        written[0] = {**written[0], "tools": text}
    return written


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {"role": message["role"], "content": _calls_as_text(message["content"], calls) + TOOL_CALL_END}


def _calls_as_text(content: str, calls: list[dict[str, Any]]) -> str:
    return content + TOOL_CALL + json.dumps([call["function"] for call in calls], ensure_ascii=False)


def _granite_turns(messages: Messages) -> Messages:
    """Return the messages with the roles of Granite 3.0's template: its own role for calls, and one for results."""
    written: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            if message["content"]:
                written.append({"role": "assistant", "content": message["content"]})
            text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            written.append({"role": "assistant_tool_call", "content": text})
        else:
            written.append({**message, "role": "tool_response"} if message["role"] == "tool" else message)
    return written


GRANITE = ToolFormat(
    name="granite",
    models="Granite 3.1 to 3.3",
    example='<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]',
    parser=GraniteToolParser,
    delimiters=(TOOL_CALL,),
    marks=(TOOL_CALL,),
    forced_calls=partial(forced_list, TOOL_CALL),
    optional_calls=partial(grammar.text_then_calls, TOOL_CALL),
    calls_as_text=_calls_as_text,
)
GRANITE_3_0 = replace(
    GRANITE, name="granite_3_0", models="Granite 3.0", marks=(), calls_as_text=None, own_turns=_granite_turns
)
PHI4_MINI = ToolFormat(
    name="phi4_mini",
    models="Phi-4-mini, with the template of the checkpoint",
    example='<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]<|/tool_call|>',
    parser=Phi4MiniToolParser,
    delimiters=(TOOL_CALL, TOOL_CALL_END),
    forced_calls=partial(forced_list, TOOL_CALL, end=TOOL_CALL_END),
    optional_calls=partial(grammar.text_then_calls, TOOL_CALL),
    write_into_messages=_write_into_messages,
)
PHI4_MINI_JSON = ToolFormat(
    name="phi4_mini_json",
    models="Phi-4-mini, with a template that asks for `functools[…]`",
    example='functools[{"name": "f", "arguments": {"a": "x"}}]',
    parser=Phi4MiniToolParser,
    delimiters=(TOOL_CALL, TOOL_CALL_END),
    marks=(FUNCTOOLS,),
    forced_calls=partial(forced_list, FUNCTOOLS, head=""),
    optional_calls=partial(grammar.text_then_calls, FUNCTOOLS),
)


START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralToolParser(JsonListToolParser):
    """Parser of both Mistral formats: a list of calls after one delimiter, or a delimiter before each call."""

    DELIMITERS = (START,)
    _TAGS = (ARGS, CALL_ID)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._name = ""
        self._tag = ""

    def _head(self, character: str) -> bool:
        if _is_name(character):
            self._name, self._accept = character, self._after_name
            return True
        return super()._head(character)

    def _after_name(self, character: str) -> bool:
        """Accept the rest of the name, then its arguments or a tag."""
        if _is_name(character) and self._attempt[-1] == self._name[-1]:
            self._name += character
            return True
        return character.isspace() or self._tag_or_arguments(character)

    def _tag_or_arguments(self, character: str) -> bool:
        if character == "[":
            self._tag, self._accept = character, self._in_tag
            return True
        if character != "{" or self._name not in self._tools:
            return False
        self._begin_call("".join(self._attempt), CallParser(self._tools, self._name))
        return True

    def _in_tag(self, character: str) -> bool:
        self._tag += character
        if self._tag in self._TAGS:
            self._accept = self._after_call_id if self._tag == CALL_ID else self._arguments
        return any(tag.startswith(self._tag) for tag in self._TAGS)

    def _after_call_id(self, character: str) -> bool:
        return character.isalnum() or character.isspace() or self._tag_or_arguments(character)

    def _arguments(self, character: str) -> bool:
        return character.isspace() or (character == "{" and self._tag_or_arguments(character))


def _is_name(character: str) -> bool:
    return character.isalnum() or character in "_-.:/"


def _forced_named_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls: delimiter, name, delimiter and arguments of each."""
    start, between = grammar.delimiter(START, special_ids), grammar.delimiter(ARGS, special_ids)
    more = f" ({start} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call_{i}: {grammar.literal(name)} {between} args_{i}" for i, (name, _) in enumerate(tools)]
    heads = [f"calls: {start} tail", f"tail: call{more}", grammar.one_of_calls(tools)]
    return "\n".join([*heads, *rules, *grammar.arguments(tools)])


def _named_calls_as_text(content: str, calls: list[dict[str, Any]]) -> str:
    functions = [call["function"] for call in calls]
    written = [f"{START}{f['name']}{ARGS}{json.dumps(f['arguments'], ensure_ascii=False)}" for f in functions]
    return content + "".join(written)


MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral, until 2024",
    example='[TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}}]',
    parser=MistralToolParser,
    delimiters=(START,),
    forced_calls=partial(forced_list, START),
    optional_calls=partial(grammar.text_then_calls, START),
    short_call_ids=True,
)
MISTRAL_NAMED = replace(
    MISTRAL,
    name="mistral_named",
    models="Mistral, since 2025",
    example='[TOOL_CALLS]f[ARGS]{"a": "x"}',
    needs=ARGS,
    delimiters=(START, ARGS, CALL_ID),
    forced_calls=_forced_named_calls,
    calls_as_text=_named_calls_as_text,
)
