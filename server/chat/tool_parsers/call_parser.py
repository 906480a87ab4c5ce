"""Parser of one call, character by character: an object with a name and arguments, or bare arguments.

A call is announced when its name is known to be one of the tools and its arguments are known to be an object (its first
key has been read, or it is empty). From then on its arguments are returned as they arrive. Any earlier error means that
the whole text is not a call. A scanner follows the JSON, and raises at the first invalid character.
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
    """A piece of the response's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a call. Its arguments follow."""

    name: str
    id: str = ""  # id in the model's own notation; "": the server assigns an id


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the last call's arguments."""

    text: str


MessageEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def merged(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Join adjacent events of the same type, and drop events without text."""
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
    """Set the text of the last event to the joined pieces."""
    if len(texts) > 1:
        result[-1] = type(result[-1])("".join(texts))
    texts.clear()


_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_MAX_SCALAR = 1024
_MAX_DEPTH = 128
_HEX = frozenset("0123456789abcdefABCDEF")
Tools = Mapping[str, Mapping[str, Any]]  # function name -> JSON schema of its arguments
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
Steps = Generator[None, str, None]  # receives one character at a time
Reads = Generator[None, str, str]  # receives characters and returns the text that was read
_MAX_WORD = 256  # limit in characters for a name; longer text is not a name


class MalformedError(ValueError):
    """Raised for a character that cannot follow here in JSON."""


class JsonScanner:
    """Incremental scanner of one JSON value.

    After each `push`: `value_began` (this character is the first of a value in the outermost object), `value_ended`
    (such a value is complete; `ended_before`: this character comes after it), `done` (the whole value is complete).
    """

    def __init__(self) -> None:
        self.done = False
        self.key = ""  # most recent key of the outermost object
        self.value_began = self.value_ended = self.ended_before = False
        self._stack: list[str] = []
        self._expects = "value"
        self._in_string = self._is_key = False
        self._escape = 0  # remaining characters of an escape sequence; 5: directly after the backslash
        self._scalar = ""
        self._key_text: list[str] = []

    @property
    def depth(self) -> int:
        """Number of open objects and lists."""
        return len(self._stack)

    @property
    def awaits_value(self) -> bool:
        """Whether a key and its colon have been read, and its value has not begun."""
        return self._expects == "value" and self._stack[-1:] == ["{"]

    @property
    def in_string(self) -> bool:
        """Whether the last character is inside a string; false for its closing quote."""
        return self._in_string

    def push(self, character: str) -> None:
        """Consume one character. Raises `MalformedError` if it cannot follow here."""
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
        """Begin a key or a value."""
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
        """Finish a value; its last character has been read."""
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
    """Raised if the text so far is not a call of any tool. The character that showed it has not been consumed."""


class CallParser:
    """Parser of one call. After `announced` it can only end (`done`) or become invalid (`broken`)."""

    rest = ""

    def __init__(self, tools: Tools, name: str | None = None) -> None:
        """`name`: the function, if the text is only its arguments; None: an object with name and arguments."""
        self._tools = tools
        self._is_bare = name is not None
        self._scanner = JsonScanner()
        self._name = name
        self._value: list[str] | None = None  # characters of the name, or of arguments that cannot be emitted yet
        self._arguments = ""  # complete arguments that precede the name
        self._streams = False  # the current value is the arguments, emitted as they arrive
        self._beginning: list[str] = []  # start of the arguments, until they are known to be an object
        self.announced = False
        self.broken = False  # invalid JSON has followed the announcement
        self.done = False

    def push(self, character: str) -> list[MessageEvent]:
        """Return the events that one character completes. Raises `NoCallError` if the text is not a call."""
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
        """Return no events at the end of the text: incomplete JSON stays incomplete."""
        return []

    def _stream(self, character: str, events: list[MessageEvent]) -> None:
        """Emit a character of the arguments if they are known to be an object; buffer it otherwise."""
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
    """Return the JSON text of arguments that are an object, an object in a string, or null."""
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
    """Return the character, escaped if JSON requires it: models write raw line ends into strings."""
    return json.dumps(character)[1:-1] if in_string and character < " " else character


class CallReader(Protocol):
    """Reader of one call, fed character by character."""

    announced: bool
    broken: bool
    done: bool
    rest: str  # text read beyond the end of the call, to be examined again

    def push(self, character: str) -> list[MessageEvent]:
        """Return the events that one character completes. Raises `NoCallError` if the text is not a call."""
        ...

    def finish(self) -> list[MessageEvent]:
        """Return the events that complete the call, if the output may end here."""
        ...


class EndOfTextError(Exception):
    """Raised inside a `CallScript` if the model has ended its output."""


class CallScript(ABC):
    """Reader of a call in a model's own notation, written as a generator.

    The call is announced by `_open`; from then on it can only end (`done`) or become invalid (`broken`).
    """

    def __init__(self, tools: Tools) -> None:
        self.announced = self.broken = self.done = False
        self.rest = ""
        self._tools = tools
        self._name = ""
        self._beginning: list[str] = []  # start of the arguments, until the call is announced
        self._events: list[MessageEvent] = []
        self._back = ""  # a character that the next step examines again
        self._steps = self._read()
        next(self._steps)

    def push(self, character: str) -> list[MessageEvent]:
        """Return the events that one character completes. Raises `NoCallError` if the text is not a call."""
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
        """Return the events at the end of the text. A notation whose last tags are optional completes the call."""
        self._events = []
        if self.announced and not (self.broken or self.done):
            with contextlib.suppress(StopIteration, EndOfTextError):
                self._steps.throw(EndOfTextError())
        return self._events

    @abstractmethod
    def _read(self) -> Steps:
        """Read the call, from the character after its delimiter. Raises `MalformedError` if the text is not a call.

        The last character that it reads must be the last of the call.
        """

    def _expect(self, name: str) -> None:
        """Expect the arguments of this function. Raises `MalformedError` if it is not in the tools."""
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
        """Skip white space, if there is any."""
        while True:
            character = yield from self._character()
            if not character.isspace():
                self._back = character
                return

    def _one_of(self, *texts: str) -> Reads:
        """Read any of these texts; none is a prefix of another."""
        read = ""
        while read not in texts:
            read += yield from self._character()
            if not any(text.startswith(read) for text in texts):
                raise MalformedError
        return read

    def _word(self) -> Reads:
        """Read a function's name; the character after it is examined again."""
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
        """Read the arguments as one JSON object, and announce the call."""
        if name not in self._tools:
            raise MalformedError
        arguments = CallParser(self._tools, name)
        while not (arguments.done or arguments.broken):
            character = yield from self._character()
            self._events += arguments.push(character)
            self.announced = arguments.announced
        self.broken = arguments.broken
