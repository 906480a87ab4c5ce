"""Llama's calls as JSON: `{"name": …, "parameters": {…}}`, as the whole response, after a tag, or after text.

An object in the response that is not a call is text up to its end, including any objects inside it.
"""

from collections.abc import Sequence

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import (
    CallParser,
    CallReader,
    ContentDelta,
    MessageEvent,
    NoCallError,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_BRACE, _SEPARATOR = "{", ";"
_KEYS = ("name", "parameters", "arguments", "type", "id")


class LlamaCall(CallParser):
    """Reader of an object that may be a call. Any other object is read to its end without searching inside it."""

    def __init__(self, tools: Tools, delimiter: str) -> None:
        """`delimiter`: text before the object. With a tag it is a call; without a tag, a call must have arguments."""
        super().__init__(tools)
        self._is_tagged = delimiter != _BRACE
        self._skips = END if delimiter == START else ""  # Llama 4 may write an empty pair of tags before the object
        self._skipped = ""
        self.is_text = False  # it is not a call

    def push(self, character: str) -> list[MessageEvent]:
        """Return the events that one character completes. Raises `NoCallError` if the text is not a call."""
        if self._skipped != self._skips and self._skips.startswith(self._skipped + character):
            self._skipped += character
            return []
        if self._skipped not in ("", self._skips):
            raise NoCallError
        return super().push(character)

    def _in_object(self, character: str) -> list[MessageEvent]:
        scanner = self._scanner
        events: list[MessageEvent] = []
        if scanner.value_began and scanner.key not in _KEYS and not self.announced:
            self.is_text = True
        if not self.is_text:
            try:
                events = super()._in_object(character)
            except NoCallError:
                self.is_text = True
        self.done = scanner.done
        return events

    def _end_call(self, events: list[MessageEvent]) -> None:
        if not (self._is_tagged or self.announced):
            raise NoCallError
        super()._end_call(events)


class LlamaToolParser(ToolParser):
    """Parser of calls anywhere in a response, separated by `;`."""

    DELIMITERS = (TAG, START, END, _BRACE, _SEPARATOR)
    CLOSING = (END, _SEPARATOR)

    def _reader(self, delimiter: str) -> CallReader:
        reader = LlamaCall(self._tools, delimiter)
        if delimiter == _BRACE:
            reader.push(delimiter)
        return reader

    def _follow_call(self, call: CallReader, character: str, events: list[MessageEvent]) -> bool:
        consumed = super()._follow_call(call, character, events)
        if isinstance(call, LlamaCall) and call.is_text and self._call is call:
            events.append(ContentDelta("".join(self._attempt)))
            self._attempt = []
            if call.done:
                self._call, self._searching = None, True
        return consumed


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for one forced call as a bare object: the model was not trained to write several."""
    return "\n".join(["calls: call", *grammar.call_objects(tools, "parameters")])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules: output that begins with a brace is a call; other output has no object that looks like a call."""
    before = f"<[{special_ids[TAG]}]>? " if TAG in special_ids else ""
    object_begins = "(?s:.*)" + r"""\{[ \t\r\n]*"(?:""" + "|".join(_KEYS) + """)"(?s:.*)"""
    words = f"words: WORDS\nWORDS: /([^{{](?s:.*))?/ & ~/{object_begins}/"
    return "(words | tagged)", f"tagged: {before}calls\n{words}"


LLAMA = ToolFormat(
    name="llama3",
    models="Llama 3 and 4",
    example='{"name": "f", "parameters": {"a": "x"}}',
    aliases=("llama3_json", "llama4_json"),
    parser=LlamaToolParser,
    delimiters=(TAG, START, END),
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)
