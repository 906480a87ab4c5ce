"""Reads values in a notation of their own, and writes them as JSON while they come."""

from __future__ import annotations

import json
from abc import abstractmethod

from oarlock.server.chat.tool_parsers.call_parser import CallScript, MalformedError, Reads, Steps

_MAX_DEPTH = 64
_MAX_SCALAR = 1024
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BRACKETS = {"{": "}", "[": "]", "(": ")"}


class LiteralCall(CallScript):
    """A call whose arguments are pairs of keys and values."""

    is_lenient = False  # text without quotes is a string

    @abstractmethod
    def _string(self) -> Steps:
        """The rest of a string, from behind its first character."""

    @abstractmethod
    def _begins_string(self, character: str) -> bool:
        """Whether a string begins with this character."""

    def _pairs(self, close: str, between: str, depth: int = 0) -> Steps:
        """Pairs up to the closing bracket; the opening one has been read."""
        self._write("{")
        separator = ""
        while True:
            yield from self._space()
            if self._back == close:
                yield from self._character()
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
                if self._back == close:  # Python's comma at the end
                    continue
            self._write(separator)
            separator = ", "
            yield from self._value(depth)

    def _scalar(self) -> Reads:
        """Reads a scalar up to the character that ends it, which is looked at again."""
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
                raise MalformedError from None
            return json.dumps(text, ensure_ascii=False)
        return written


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN and Infinity are no JSON
