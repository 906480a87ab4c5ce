"""A list of call objects behind a delimiter: `<|tool_call|>[{"name": …, "arguments": {…}}]`.

Granite 3 and Phi-4-mini write it, and older models of Mistral; newer ones write `[TOOL_CALLS]name[ARGS]{…}`.
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
    NoCallError,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

TOOL_CALL, TOOL_CALL_END, FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["
_GRANITE_TEXT = "<tool_call>"  # what Granite 3.1 writes in place of the token


class JsonListToolParser(ToolParser):
    """A list of calls behind the delimiter, or one call without brackets."""

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        # Between the delimiter and the call: takes the next character, False where it cannot come there.
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
            return self._give_up(events)
        if self._call is not None:
            return False  # the brace is the call's first character
        self._attempt.append(character)
        if self._searching:  # the list is closed: its brackets were packing
            self._attempt = []
        return True

    def _head(self, character: str) -> bool:
        if character == "[":
            self._in_list, self._accept = True, self._list
        elif character == "{":
            self._begin_call("".join(self._attempt), CallParser(self._tools))
        return character.isspace() or character in "[{"

    def _list(self, character: str) -> bool:
        if character == "{":
            self._begin_call("".join(self._attempt), CallParser(self._tools))
        elif character == "]":
            self._searching = True
        return character.isspace() or character in "{],"


class GraniteToolParser(JsonListToolParser):
    """Granite 3's lists, behind the token or its older spelling."""

    DELIMITERS = (TOOL_CALL, _GRANITE_TEXT)


class Phi4MiniToolParser(JsonListToolParser):
    """Phi-4-mini's lists: between tokens, or behind the word that its second template asks for."""

    DELIMITERS = (TOOL_CALL, TOOL_CALL_END, FUNCTOOLS)
    CLOSING = (TOOL_CALL_END,)


def forced_list(
    start: str, tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds, head: str = "[", end: str = ""
) -> str:
    """Rules for forced calls as one list behind `start`. `head`: its bracket, unless that belongs to `start`."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    opening = f"{grammar.literal(head)} " if head else ""
    closing = f" {grammar.delimiter(end, special_ids)}" if end else ""
    rules = [f"calls: {grammar.delimiter(start, special_ids)} tail", f'tail: {opening}call{more} "]"{closing}']
    return "\n".join([*rules, *grammar.call_objects(tools, "arguments")])


def _write_into_messages(messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """Phi-4-mini's template takes the tools as a text of the system message, and calls as the text they were."""
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


GRANITE = ToolFormat(
    name="granite",
    models="Granite 3",
    example='<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]',
    parser=GraniteToolParser,
    delimiters=(TOOL_CALL,),
    matches=lambda template: "<|start_of_role|>" in template and "</tool_call>" not in template,
    forced_calls=partial(forced_list, TOOL_CALL),
    optional_calls=partial(grammar.text_then_calls, TOOL_CALL),
    calls_as_text=_calls_as_text,
)
PHI4_MINI = ToolFormat(
    name="phi4_mini",
    models="Phi-4-mini, with the template of the checkpoint",
    example='<|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]<|/tool_call|>',
    parser=Phi4MiniToolParser,
    delimiters=(TOOL_CALL, TOOL_CALL_END),
    matches=lambda template: "'<|tool|>'" in template and "tools'" in template,
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
    matches=lambda template: FUNCTOOLS in template,
    forced_calls=partial(forced_list, FUNCTOOLS, head=""),
    optional_calls=partial(grammar.text_then_calls, FUNCTOOLS),
)


START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralToolParser(JsonListToolParser):
    """Both formats: a list of calls behind one delimiter, or a delimiter before each call."""

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
        """The name, and then its arguments, or a tag."""
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
    """Rules for forced calls: delimiter, name, delimiter and arguments of each."""
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
    matches=lambda template: START in template and ARGS not in template,
    forced_calls=partial(forced_list, START),
    optional_calls=partial(grammar.text_then_calls, START),
    short_call_ids=True,
)
MISTRAL_NAMED = replace(
    MISTRAL,
    name="mistral_named",
    models="Mistral, since 2025",
    example='[TOOL_CALLS]f[ARGS]{"a": "x"}',
    delimiters=(START, ARGS, CALL_ID),
    matches=lambda template: START in template and ARGS in template,
    forced_calls=_forced_named_calls,
    calls_as_text=_named_calls_as_text,
)


TAG = "<|python_tag|>"
_LLAMA_KEYS = ("name", "parameters", "arguments", "type", "id")


class LlamaCall(CallParser):
    """Reader of an object that may be a call. One that is none is text to its end, whatever objects are in it."""

    def __init__(self, tools: Tools, in_text: bool = False) -> None:
        """`in_text`: a call needs arguments, since words precede it."""
        super().__init__(tools)
        self._in_text = in_text
        self.is_text = False  # it is no call

    def _in_object(self, character: str) -> list[MessageEvent]:
        scanner = self._scanner
        events: list[MessageEvent] = []
        if scanner.value_began and scanner.key not in _LLAMA_KEYS and not self.announced:
            self.is_text = True
        if not self.is_text:
            try:
                events = super()._in_object(character)
            except NoCallError:
                self.is_text = True
        self.done = scanner.done
        return events

    def _end_call(self, events: list[MessageEvent]) -> None:
        if self._in_text and not self.announced:
            raise NoCallError
        super()._end_call(events)


class LlamaToolParser(ToolParser):
    """A call as the whole answer, behind the tag, or behind a text; `;` separates several."""

    DELIMITERS = (TAG, "{")

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._searching = False
        self._tag_size = 0  # characters of the tag that the attempt ends with
        self._any_call = False

    def _reader(self, delimiter: str) -> CallReader:
        reader = LlamaCall(self._tools, delimiter == "{")
        if delimiter == "{":
            reader.push(delimiter)
        return reader

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        if self._call is None:
            return self._before_call(character, events)
        call = self._call
        consumed = self._follow_call(call, character, events)
        if isinstance(call, LlamaCall) and call.is_text:
            events.append(ContentDelta("".join(self._attempt)))
            self._attempt = []
            if call.done:
                self._call, self._searching = None, True
        elif consumed and self._searching and self._sink is ContentDelta:
            self._searching = False  # complete: another may follow
            self._any_call = True
        return consumed

    def _before_call(self, character: str, events: list[MessageEvent]) -> bool:
        """At the start, or behind a call: only white space, a separator, the tag or a brace may come."""
        if character == TAG[self._tag_size]:
            self._tag_size += 1
            self._attempt.append(character)
            if self._tag_size == len(TAG):
                self._tag_size = 0
                self._begin_call("".join(self._attempt), self._reader(TAG))
            return True
        if self._tag_size:
            self._tag_size = 0
            return self._give_up(events)
        if character.isspace() or (character == ";" and self._any_call and ";" not in self._attempt):
            self._attempt.append(character)
            return True
        if character != "{":
            return self._give_up(events)
        self._begin_call("".join(self._attempt), self._reader(TAG))
        return False


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Rules for one forced call as a bare object: the model was not trained to write several."""
    return "\n".join(["calls: call", *grammar.call_objects(tools, "parameters")])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """An answer that begins with a brace is a call; another one has no object in it that could be read as a call."""
    before = f"<[{special_ids[TAG]}]>? " if TAG in special_ids else ""
    object_begins = "(?s:.*)" + r"""\{[ \t\r\n]*"(?:""" + "|".join(_LLAMA_KEYS) + """)"(?s:.*)"""
    words = f"words: WORDS\nWORDS: /([^{{](?s:.*))?/ & ~/{object_begins}/"
    return "(words | tagged)", f"tagged: {before}calls\n{words}"


def _matches(template: str) -> bool:
    is_llama = "python_tag" in template or "<|start_header_id|>" in template
    return is_llama and '"parameters"' in template and "<tool_call>" not in template


LLAMA = ToolFormat(
    name="llama3",
    models="Llama 3",
    example='{"name": "f", "parameters": {"a": "x"}}',
    aliases=("llama3_json", "llama4_json"),
    parser=LlamaToolParser,
    delimiters=(TAG,),
    matches=_matches,
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)
