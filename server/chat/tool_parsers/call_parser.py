"""Parses one call, character by character: an object with a name and arguments, or the bare arguments.

A call is announced once its name is known to be one of the tools and its arguments are known to begin as an object:
with a first key, or empty. From there on its arguments are returned as they come. Before that, anything wrong makes the
whole text no call at all. JSON is followed by a scanner, which raises at the first character that cannot be there.
"""

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow."""

    name: str
    id: str = ""  # in the model's own notation; "": any id will do


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the last call's arguments."""

    text: str


MessageEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def merged(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Joins neighbouring events of one kind, and leaves out those without text."""
    result: list[MessageEvent] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            _close(result, texts)
            result.append(event)
        elif event.text:
            if not (texts and result and type(result[-1]) is type(event)):
                _close(result, texts)
                result.append(event)
            texts.append(event.text)
    _close(result, texts)
    return result


def _close(result: list[MessageEvent], texts: list[str]) -> None:
    """Give the last event the text that was gathered for it."""
    if len(texts) > 1:
        result[-1] = type(result[-1])("".join(texts))
    texts.clear()


_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_MAX_SCALAR = 1024
_MAX_DEPTH = 128
_HEX = frozenset("0123456789abcdefABCDEF")
Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of its arguments, by a function's name
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
Steps = Generator[None, str, None]  # takes one character at a time
Reads = Generator[None, str, str]  # and returns what it has read
_MAX_WORD = 256  # characters of a name: what is longer is text


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
    def awaits_value(self) -> bool:
        """Whether the last character ended a key and its colon."""
        return self._expects == "value" and self._stack[-1:] == ["{"]

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


class NoCallError(ValueError):
    """The text so far is not a call of any tool. The character that showed it has not been consumed."""


class CallParser:
    """Parser of one call. After `announced` it can only end (`done`) or break off."""

    rest = ""

    def __init__(self, tools: Tools, name: str | None = None) -> None:
        """With a `name` the text is the bare arguments; without, an object that holds both."""
        self._tools = tools
        self._is_bare = name is not None
        self._scanner = JsonScanner()
        self._name = name
        self._value: list[str] | None = None  # of the name, or of arguments that cannot be returned yet
        self._arguments = ""  # complete, before the name was known
        self._streams = False  # the current value is the arguments, returned as they come
        self._beginning: list[str] = []  # of the arguments, until it is known to be that of an object
        self.announced = False
        self.broken = False  # after the announcement something came that is not JSON
        self.done = False

    def push(self, character: str) -> list[MessageEvent]:
        """The events that one character completes. Raises `NoCallError`."""
        if self.broken:
            return [ArgumentsDelta(character)]
        if not self._scanner.depth and character != "{" and not character.isspace():
            raise NoCallError  # a call is an object
        try:
            self._scanner.push(character)
        except MalformedError:
            return self._break(character)
        if self._is_bare:
            return self._bare(character)
        return self._in_object(character)

    def _break(self, character: str) -> list[MessageEvent]:
        if not self.announced:
            raise NoCallError
        self.broken = True
        return [ArgumentsDelta(character)]

    def _bare(self, character: str) -> list[MessageEvent]:
        if not self._scanner.depth and character.isspace():
            return []
        events: list[MessageEvent] = []
        self._stream(character, events)
        self.done = self._scanner.done
        return events

    def finish(self) -> list[MessageEvent]:
        """The events of the text's end: JSON that is not complete stays so."""
        return []

    def _stream(self, character: str, events: list[MessageEvent]) -> None:
        """Pass on a character of the arguments, once they are known to be an object."""
        scanner = self._scanner
        text = _escaped(character, scanner.in_string)
        if not self.announced:
            self._beginning.append(text)
            if not (scanner.awaits_value or scanner.value_ended or scanner.done):
                return
            self._announce(events)
            text = "".join(self._beginning)
        events.append(ArgumentsDelta(text))

    def _in_object(self, character: str) -> list[MessageEvent]:
        scanner = self._scanner
        events: list[MessageEvent] = []
        if scanner.value_began:
            self._begin_value(character, events)
        if self._streams:
            self._stream(character, events)
        elif self._value is not None and not scanner.ended_before:
            self._value.append(_escaped(character, scanner.in_string))
        if scanner.value_ended:
            self._end_value(events)
        if scanner.done:
            self._end_call(events)
        return events

    def _begin_value(self, character: str, events: list[MessageEvent]) -> None:
        key = self._scanner.key
        if key in _NAME_KEYS and self._name is None:
            if character != '"':
                raise NoCallError
            self._value = []
        elif key in _ARGUMENT_KEYS and not self.announced and not self._arguments:
            if character not in '{"n':  # an object, an object in a string, or null
                raise NoCallError
            if self._name is not None and character == "{":
                self._streams = True
            else:
                self._value = []

    def _end_value(self, events: list[MessageEvent]) -> None:
        self._streams = False
        if self._value is None:
            return
        text, self._value = "".join(self._value), None
        if self._scanner.key in _NAME_KEYS:
            self._name = json.loads(text)
            if self._name not in self._tools:
                raise NoCallError
        else:
            self._arguments = _as_object(text)
        if self._name is not None and self._arguments:
            self._announce(events)
            events.append(ArgumentsDelta(self._arguments))

    def _announce(self, events: list[MessageEvent]) -> None:
        self.announced = True
        events.append(ToolCallStart(self._name or ""))

    def _end_call(self, events: list[MessageEvent]) -> None:
        if self._name is None:
            raise NoCallError
        if not self.announced:
            self._announce(events)
            events.append(ArgumentsDelta("{}"))
        self.done = True


def _as_object(text: str) -> str:
    """The JSON text of arguments that came as an object, as an object in a string, or as null."""
    if text.startswith("{"):
        return text
    if text == "null":
        return "{}"
    inner = json.loads(text)
    if not _is_object(inner):
        raise NoCallError
    return inner


def _is_object(text: str) -> bool:
    try:
        text.encode()  # a lone surrogate could not be sent
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _escaped(character: str, in_string: bool) -> str:
    """The character, escaped where JSON requires it: models write line ends into strings as they are."""
    return json.dumps(character)[1:-1] if in_string and character < " " else character


class CallReader(Protocol):
    """Reader of one call, fed character by character."""

    announced: bool
    broken: bool
    done: bool
    rest: str  # read beyond the end of the call: it is looked at again

    def push(self, character: str) -> list[MessageEvent]:
        """The events that one character completes. Raises `NoCallError`."""
        ...

    def finish(self) -> list[MessageEvent]:
        """The events that complete the call, if the model may end its answer here."""
        ...


class EndOfTextError(Exception):
    """The model has ended its answer."""


class CallScript(ABC):
    """A call in a notation of its own, read step by step.

    It is announced by `_open`; from then on it can only end (`done`) or break off (`broken`).
    """

    def __init__(self, tools: Tools) -> None:
        self.announced = self.broken = self.done = False
        self.rest = ""
        self._tools = tools
        self._name = ""
        self._beginning: list[str] = []  # of the arguments, until the call is announced
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

    def finish(self) -> list[MessageEvent]:
        """The events of the text's end. A notation that can do without its last tags completes the call."""
        self._events = []
        if self.announced and not (self.broken or self.done):
            with contextlib.suppress(StopIteration, EndOfTextError):
                self._steps.throw(EndOfTextError())
        return self._events

    @abstractmethod
    def _read(self) -> Steps:
        """Reads the call, from the character behind its delimiter. Raises `MalformedError`.

        Its last step takes a character that can only be the call's last.
        """

    def _expect(self, name: str) -> None:
        """Expect the arguments of this function."""
        if name not in self._tools:
            raise MalformedError
        self._name = name

    def _open(self) -> None:
        """Announce the call: its arguments are known to be an object."""
        if not self.announced:
            self.announced = True
            self._events += [ToolCallStart(self._name), *map(ArgumentsDelta, self._beginning)]

    def _write(self, text: str) -> None:
        if self.announced:
            self._events.append(ArgumentsDelta(text))
        else:
            self._beginning.append(text)

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
