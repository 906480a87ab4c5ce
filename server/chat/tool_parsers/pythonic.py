"""Calls as a list in Python's notation: `[f(a=1, b="x"), g()]`, as the whole response or after `<|python_start|>`."""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat
from oarlock.server.chat.tool_parsers.call_parser import CallReader, CallScript, MalformedError, Reads, Steps, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, literal
from oarlock.server.chat.tool_parsers.json_list import JsonListToolParser
from oarlock.server.chat.tool_parsers.text_values import DEFINITIONS, argument_names, property_schema

_MAX_DEPTH = 64
_MAX_SCALAR = 1024
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"{": "}", "[": "]", "(": ")"}


class LiteralCall(CallScript):
    """Reader of a call whose arguments are pairs of keys and values."""

    is_lenient = False  # text without quotes is a string

    @abstractmethod
    def _string(self) -> Steps:
        """Read the rest of a string, from after its first character."""

    @abstractmethod
    def _begins_string(self, character: str) -> bool:
        """Return whether a string begins with this character."""

    def _pairs(self, close: str, between: str, depth: int = 0) -> Steps:
        """Read pairs up to the closing bracket; the opening bracket has been read."""
        self._write("{")
        separator = ""
        while True:
            yield from self._space()
            if self._back == close:
                yield from self._character()
                self._open()
                self._write("}")
                return
            if separator:
                yield from self._one_of(",")
                yield from self._space()
            self._write(separator)
            separator = ", "
            if self._begins_string(self._back):
                yield from self._value(depth)
            else:
                self._write(json.dumps((yield from self._word())))
            yield from self._space()
            yield from self._one_of(between)
            self._open()
            self._write(": ")
            yield from self._value(depth)

    def _value(self, depth: int) -> Steps:
        yield from self._space()
        if self._begins_string(self._back):
            yield from self._character()
            self._write('"')
            yield from self._string()
            self._write('"')
        elif self._back in _BRACKETS:
            if depth >= _MAX_DEPTH:
                raise MalformedError
            bracket = yield from self._character()
            if bracket == "{":
                yield from self._pairs("}", ":", depth + 1)
            else:
                yield from self._items(_BRACKETS[bracket], depth + 1)
        else:
            self._write(self._scalar_of((yield from self._scalar())))

    def _items(self, close: str, depth: int) -> Steps:
        self._write("[")
        separator = ""
        while True:
            yield from self._space()
            if self._back == close:
                yield from self._character()
                self._write("]")
                return
            if separator:
                yield from self._one_of(",")
                yield from self._space()
                if self._back == close:  # Python allows a trailing comma
                    continue
            self._write(separator)
            separator = ", "
            yield from self._value(depth)

    def _scalar(self) -> Reads:
        """Read a scalar up to the character that ends it, which is examined again."""
        read = ""
        while True:
            character = yield from self._character()
            if character in ",)]}":
                self._back = character
                return read.strip()
            read += character
            if len(read) > _MAX_SCALAR:
                raise MalformedError

    def _scalar_of(self, text: str) -> str:
        written = _WORDS.get(text, text)
        try:
            json.loads(written, parse_constant=_refuse)
        except ValueError:
            if not (self.is_lenient and text):
                self._write(text)  # emit invalid arguments unchanged
                raise MalformedError from None
            return json.dumps(text, ensure_ascii=False)
        return written


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN and Infinity are not JSON


START, END = "<|python_start|>", "<|python_end|>"
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
_HEX = frozenset("0123456789abcdefABCDEF")


class PythonCall(LiteralCall):
    """Reader of a call such as `f(a=1)`."""

    def __init__(self, tools: Tools) -> None:
        self._quote = ""
        super().__init__(tools)

    def _read(self) -> Steps:
        name = yield from self._word()
        yield from self._one_of("(")
        self._expect(name)
        yield from self._pairs(")", "=")

    def _begins_string(self, character: str) -> bool:
        self._quote = character
        return character in "'\""

    def _string(self) -> Steps:
        quote = self._quote
        while (character := (yield from self._character())) != quote:
            if character != "\\":
                self._write(json.dumps(character, ensure_ascii=False)[1:-1])
                continue
            escaped = yield from self._character()
            if escaped in "xu":
                size = 2 if escaped == "x" else 4
                digits = ""
                for _ in range(size):
                    digits += yield from self._character()
                if not set(digits) <= _HEX:
                    raise MalformedError
                self._write(f"\\u{digits:0>4}")
            else:
                self._write(_ESCAPES.get(escaped) or json.dumps(f"\\{escaped}", ensure_ascii=False)[1:-1])


class PythonicToolParser(JsonListToolParser):
    """Parser of a list of calls as the whole response, or after the delimiter."""

    DELIMITERS = (START, END)
    CLOSING = (END,)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._searching = False

    def _reader(self, delimiter: str) -> CallReader:
        return PythonCall(self._tools)

    def _head(self, character: str) -> bool:
        if character == "[":
            self._in_list, self._accept = True, self._list
        return character.isspace() or character == "["

    def _list(self, character: str) -> bool:
        if character == "]":
            self._searching = True
        elif character.isalpha() or character == "_":
            self._begin_call("".join(self._attempt), PythonCall(self._tools))
            return True
        return character.isspace() or character in "],"


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls as a list. Raises `RequestError` if a schema cannot be enforced."""
    return "\n".join([f'calls: "[" {repeated_calls(most, ", ")} "]"', *call_rules(tools)])


def repeated_calls(most: int, separator: str) -> str:
    """Return the part of a rule for one to `most` calls."""
    return f"call ({literal(separator)} call){{0,{most - 1}}}" if most > 1 else "call"


def call_rules(tools: Sequence[ToolSchema]) -> list[str]:
    """Return rules for `call`, with values as JSON. Raises `RequestError` if a schema cannot be enforced."""
    rules = [grammar.one_of_calls(tools)]
    for index, (name, schema) in enumerate(tools):
        pairs = []
        for number, (key, is_required) in enumerate(argument_names(schema)):
            value = property_schema(schema, key)
            definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
            described = {**definitions, **(value if isinstance(value, dict) else {})}
            rules.append(grammar.schema_rule(f"v_{index}_{number}", described))
            pairs.append((f"{literal(key + '=')} v_{index}_{number}", is_required))
        rules += grammar.pairs(f"pairs_{index}", pairs, ", ")
        rules.append(f"call_{index}: {literal(name + '(')} pairs_{index} {literal(')')}")
    return rules


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules: output that begins with a bracket is a call."""
    before = f"<[{special_ids[START]}]>? " if START in special_ids else ""
    return "(words | tagged)", f"tagged: {before}calls\nwords: /([^\\[](?s:.*))?/"


PYTHONIC = ToolFormat(
    name="pythonic",
    models="Llama 3.2 and 4, if their template asks for it",
    example='[f(a="x"), g()]',
    aliases=("llama4_pythonic",),
    parser=PythonicToolParser,
    delimiters=(START, END),
    marks=("[func_name1(",),
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)


class Lfm2ToolParser(PythonicToolParser):
    """Parser of a list of calls between tokens, with other text around them."""

    DELIMITERS = ("<|tool_call_start|>", "<|tool_call_end|>")
    CLOSING = DELIMITERS[1:]

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._searching = True


def _forced_between_tokens(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls, as `_forced_calls`, between the tokens."""
    start, end = (grammar.delimiter(text, special_ids) for text in Lfm2ToolParser.DELIMITERS)
    head, rest = _forced_calls(tools, most, special_ids).split("\n", 1)
    return f"calls: {start} tail\ntail: {head.removeprefix('calls: ')} {end}\n{rest}"


def call_text(call: dict[str, Any], write: Callable[[Any], str]) -> str:
    """Return an earlier call as text, with values from `write`; arguments that are no object stay unchanged."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{key}={write(value)}" for key, value in arguments.items())
    return f"{name}({arguments})"


def _literal(value: Any) -> str:
    """Return a JSON value in Python's notation, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(item)}" for name, item in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, list) else repr(value)


def _calls_as_text(content: str, calls: list[dict[str, Any]]) -> str:
    """Return a text and the calls after it in LFM 2's notation."""
    opening, closing = Lfm2ToolParser.DELIMITERS
    return f"{content}{opening}[{', '.join(call_text(call, _literal) for call in calls)}]{closing}"


LFM2 = ToolFormat(
    name="lfm2",
    models="LFM 2 and 2.5",
    example='<|tool_call_start|>[f(a="x"), g()]<|tool_call_end|>',
    parser=Lfm2ToolParser,
    delimiters=Lfm2ToolParser.DELIMITERS,
    marks=("<|im_start|>system\nList of tools: ",),
    forced_calls=_forced_between_tokens,
    optional_calls=partial(grammar.text_then_calls, Lfm2ToolParser.DELIMITERS[0]),
    calls_as_text=_calls_as_text,
)
