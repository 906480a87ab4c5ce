"""Follows one JSON value character by character, and raises at the first character that cannot be there."""

from __future__ import annotations

import json
import re

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_MAX_SCALAR = 1024
_MAX_DEPTH = 128
_HEX = frozenset("0123456789abcdefABCDEF")


class MalformedError(ValueError):
    """This character cannot follow here in JSON."""


class JsonScanner:
    """Scanner of one JSON value: its state between two characters.

    After each `push`: `value_began` (this character is the first of a value in the outermost object), `value_ended` (a
    value there is complete; `ended_before`: this character comes after it), `done` (the whole is complete).
    """

    def __init__(self) -> None:
        self.done = False
        self.key = ""  # of the outermost object, the last one
        self.value_began = self.value_ended = self.ended_before = False
        self._stack: list[str] = []
        self._expects = "value"
        self._in_string = self._is_key = False
        self._escape = 0  # characters of an escape sequence still to come; 5: the one after the backslash
        self._scalar = ""
        self._key_text: list[str] = []

    @property
    def depth(self) -> int:
        """Number of objects and lists that are open."""
        return len(self._stack)

    @property
    def in_string(self) -> bool:
        """Whether the last character is inside a string; false for its closing quote."""
        return self._in_string

    def push(self, character: str) -> None:
        """Follow one character. Raises `MalformedError`."""
        self.value_began = self.value_ended = self.ended_before = False
        if self._in_string:
            self._string(character)
            return
        if self._scalar:
            if character in _SCALAR_CHARACTERS:
                self._scalar += character
                if len(self._scalar) > _MAX_SCALAR:
                    raise MalformedError
                return
            self._end_scalar()
        if character in " \t\n\r":
            return
        if character in '"{[' or character in _SCALAR_CHARACTERS:
            self._begin(character)
        elif character in "}]":
            self._close(character)
        elif character == ":" and self._expects == "colon":
            self._expects = "value"
        elif character == "," and self._expects == "comma":
            self._expects = "key" if self._stack[-1] == "{" else "value"
        else:
            raise MalformedError

    def _begin(self, character: str) -> None:
        """A key or a value begins."""
        if character == '"' and self._expects in ("key", "first_key"):
            self._in_string = self._is_key = True
            self._key_text = []
            return
        if self.done or self._expects not in ("value", "first_value"):
            raise MalformedError
        self.value_began = self._stack == ["{"]
        if character == '"':
            self._in_string, self._is_key = True, False
        elif character in "{[":
            if len(self._stack) >= _MAX_DEPTH:
                raise MalformedError
            self._stack.append(character)
            self._expects = "first_key" if character == "{" else "first_value"
        else:
            self._scalar = character

    def _close(self, character: str) -> None:
        opening, first = ("{", "first_key") if character == "}" else ("[", "first_value")
        if not self._stack or self._stack[-1] != opening or self._expects not in (first, "comma"):
            raise MalformedError
        self._stack.pop()
        self._complete()

    def _complete(self) -> None:
        """A value is complete, its last character included."""
        self.value_ended = self.value_ended or self._stack == ["{"]
        self.done = not self._stack
        self._expects = "comma" if self._stack else "nothing"

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            raise MalformedError
        self._scalar = ""
        self._complete()
        self.ended_before = self.value_ended

    def _string(self, character: str) -> None:
        if self._escape == 5:
            if character not in '"\\/bfnrtu':
                raise MalformedError
            self._escape = 4 if character == "u" else 0
        elif self._escape:
            if character not in _HEX:
                raise MalformedError
            self._escape -= 1
        elif character == "\\":
            self._escape = 5
        elif character == '"':
            self._end_string()
            return
        if self._is_key and self._stack == ["{"]:
            self._key_text.append(character)

    def _end_string(self) -> None:
        self._in_string = False
        if self._is_key:
            self._is_key = False
            self._expects = "colon"
            if self._stack == ["{"]:
                self.key = json.loads('"' + "".join(self._key_text) + '"', strict=False)
        else:
            self._complete()
