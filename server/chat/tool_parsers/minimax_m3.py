"""MiniMax-M3's calls: XML whose tags follow a special token, `]<]minimax[>[<invoke name="f">`.

The tags of arguments have the arguments' names. Objects and lists are nested elements; a list's elements are called
`item`.
"""

import json
from collections.abc import Sequence
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallReader, CallScript, MalformedError, Reads, Steps, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, literal
from oarlock.server.chat.tool_parsers.text_values import (
    Schema,
    admitted_types,
    argument_names,
    json_value,
    property_schema,
    resolved,
    value_rules,
)

_TOKEN = "]<]minimax[>["
_START, _END = f"{_TOKEN}<tool_call>", f"{_TOKEN}</tool_call>"
_INVOKE, _INVOKE_END = f'{_TOKEN}<invoke name="', f"{_TOKEN}</invoke>"
_ITEM = "item"
_MAX_TAG = 256  # limit in characters
_MAX_DEPTH = 32


class MiniMaxM3Call(CallScript):
    """Reader of one call. An argument is emitted when it is complete."""

    def __init__(self, tools: Tools, is_first: bool) -> None:
        self._is_first = is_first
        self._ending = ""  # closing tag of an outer element that ended the current element
        super().__init__(tools)

    def _read(self) -> Steps:
        if self._is_first:
            yield from self._space()
            yield from self._one_of(_INVOKE)
        name = yield from self._word()
        yield from self._one_of('">')
        self._expect(name)
        self._write("{")
        separator = ""
        while True:
            tag = self._ending
            if not tag:
                yield from self._space()
                yield from self._one_of(_TOKEN)
                tag = yield from self._tag()
            self._ending = ""
            if tag.startswith("/"):
                break
            root = self._tools[name]
            self._open()
            value = yield from self._element(tag, property_schema(root, tag), root, 0)
            self._write(f"{separator}{json.dumps(tag, ensure_ascii=False)}: {value}")
            separator = ", "
        self._open()
        self._write("}")

    def _tag(self) -> Reads:
        """Read the name in a tag, with the slash if it is a closing tag."""
        yield from self._one_of("<")
        read = ""
        while (character := (yield from self._character())) != ">":
            read += character
            if len(read) > _MAX_TAG or character == "<":
                raise MalformedError
        if not read:
            raise MalformedError
        return read

    def _element(self, name: str, schema: Any, root: Schema, depth: int) -> Reads:
        """Read an element after its opening tag, up to its end or the end of an outer element; return its JSON."""
        if depth > _MAX_DEPTH:
            raise MalformedError
        text, children = "", []
        is_flat = not admitted_types(schema, root) & {"array", "object"}
        while not self._ending:
            text += yield from self._character()
            if not text.endswith(_TOKEN):
                continue
            text = text.removesuffix(_TOKEN)
            tag = yield from self._tag()
            if tag == f"/{name}":
                break
            if tag.startswith("/") or is_flat:  # its own closing tag is missing
                self._ending = tag
                break
            children.append((tag, (yield from self._element(tag, _inner(schema, root, tag), root, depth + 1))))
        if not children:
            return json_value(text, schema, root)
        if all(key == _ITEM for key, _ in children) and "array" in admitted_types(schema, root):
            return f"[{', '.join(value for _, value in children)}]"
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in children) + "}"


def _inner(schema: Any, root: Schema, tag: str) -> Any:
    """Return the schema of an element inside an element with the given schema."""
    known = resolved(schema, root)
    if not isinstance(known, dict):
        return True
    if tag == _ITEM and "items" in known:
        return known["items"]
    properties = known.get("properties")
    return properties.get(tag, True) if isinstance(properties, dict) else True


class MiniMaxM3ToolParser(ToolParser):
    """Parser of several calls between the outer tags."""

    DELIMITERS = (_START, _INVOKE, _INVOKE_END, _END)
    CLOSING = (_INVOKE_END, _END)

    def _reader(self, delimiter: str) -> CallReader:
        return MiniMaxM3Call(self._tools, delimiter == _START)


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls; objects and lists are forced as JSON.

    Raises `RequestError` if a schema cannot be enforced.
    """

    def mark(text: str) -> str:
        return grammar.delimited(text, (_TOKEN,), special_ids)

    line = literal("\n")
    more = f" ({mark(_INVOKE)} call {line}){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {mark(_START)} tail", f"tail: {line} {mark(_INVOKE)} call {line}{more} {mark(_END)}"]
    for index, (name, schema) in enumerate(tools):
        parts = []
        for number, (key, is_required) in enumerate(argument_names(schema)):
            rule = f"v_{index}_{number}"
            rules += value_rules(rule, schema, key, "", (_TOKEN,), special_ids)
            parts.append(f"({mark(f'{_TOKEN}<{key}>')} {rule} {literal(f'</{key}>')})" + ("" if is_required else "?"))
        head = literal(f'{name}">')
        rules.append(f"call_{index}: {' '.join([head, *parts, mark(_INVOKE_END)])}")
    return "\n".join([*rules, grammar.one_of_calls(tools)])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules for any text, optionally followed by calls."""
    return grammar.text_then_calls(_TOKEN if _TOKEN in special_ids else _START, special_ids)


MINIMAX_M3 = ToolFormat(
    name="minimax_m3",
    models="MiniMax-M3",
    example=f'{_START}\n{_INVOKE}f">{_TOKEN}<a>x{_TOKEN}</a>{_INVOKE_END}\n{_END}',
    parser=MiniMaxM3ToolParser,
    delimiters=(_TOKEN,),
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)
