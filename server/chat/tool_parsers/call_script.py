"""Reads one call that is no JSON object: the steps of its syntax in order, as a generator that takes characters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Protocol

from oarlock.server.chat.events import ArgumentsDelta, MessageEvent, ToolCallStart
from oarlock.server.chat.tool_parsers.call_parser import CallParser, NoCallError, Tools
from oarlock.server.chat.tool_parsers.json_scanner import MalformedError

Steps = Generator[None, str, None]  # takes one character at a time
Reads = Generator[None, str, str]  # and returns what it has read
_MAX_WORD = 256  # characters of a name: what is longer is text


class CallReader(Protocol):
    """Reader of one call, fed character by character."""

    announced: bool
    broken: bool
    done: bool

    def push(self, character: str) -> list[MessageEvent]:
        """The events that one character completes. Raises `NoCallError`."""
        ...


class CallScript(ABC):
    """A call is announced once its name is known; from then on it can only end (`done`) or break off (`broken`)."""

    def __init__(self, tools: Tools) -> None:
        self.announced = self.broken = self.done = False
        self._tools = tools
        self._events: list[MessageEvent] = []
        self._back = ""  # a character that the next step looks at again
        self._steps = self._read()
        next(self._steps)

    def push(self, character: str) -> list[MessageEvent]:
        """The events that one character completes. Raises `NoCallError`."""
        self._events = []
        try:
            self._steps.send(character)
        except StopIteration:
            self.done = not self.broken
        except MalformedError:
            if not self.announced:
                raise NoCallError from None
            self.broken = True
            self._write(character)
        return self._events

    @abstractmethod
    def _read(self) -> Steps:
        """Reads the call, from the character behind its delimiter. Raises `MalformedError`.

        Its last step takes a character that can only be the call's last.
        """

    def _announce(self, name: str) -> None:
        if name not in self._tools:
            raise MalformedError
        self.announced = True
        self._events.append(ToolCallStart(name))

    def _write(self, text: str) -> None:
        self._events.append(ArgumentsDelta(text))

    def _character(self) -> Reads:
        if self._back:
            character, self._back = self._back, ""
            return character
        return (yield)

    def _space(self) -> Steps:
        """White space, if there is any."""
        while True:
            character = yield from self._character()
            if not character.isspace():
                self._back = character
                return

    def _one_of(self, *texts: str) -> Reads:
        """One of these texts, none of which begins with another."""
        read = ""
        while read not in texts:
            read += yield from self._character()
            if not any(text.startswith(read) for text in texts):
                raise MalformedError
        return read

    def _word(self) -> Reads:
        """A function's name; the character behind it is looked at again."""
        read = ""
        while True:
            character = yield from self._character()
            if not (character.isalnum() or character in "_-."):
                self._back = character
                return read
            read += character
            if len(read) > _MAX_WORD:
                raise MalformedError

    def _until(self, end: str) -> Reads:
        """A short text and its end."""
        read = ""
        while not read.endswith(end):
            read += yield from self._character()
            if len(read) > _MAX_WORD:
                raise MalformedError
        return read.removesuffix(end)

    def _json_arguments(self, name: str) -> Steps:
        """The arguments as one JSON object: announces the call."""
        if name not in self._tools:
            raise MalformedError
        arguments = CallParser(self._tools, name)
        while not (arguments.done or arguments.broken):
            character = yield from self._character()
            self._events += arguments.push(character)
            self.announced = arguments.announced
        self.broken = arguments.broken
