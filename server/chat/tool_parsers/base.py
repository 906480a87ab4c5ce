"""Base of all tool-call formats: their description (`ToolFormat`) and parser (`ToolParser`).

A parser reads a model's text incrementally. Text that is not a call is content, unchanged, also if it began like a
call. Each character is examined a bounded number of times (`scanned` counts), and the result does not depend on how the
text is split into pieces.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    CallReader,
    ContentDelta,
    MessageEvent,
    NoCallError,
    ReasoningDelta,
    ToolCallStart,
    Tools,
    merged,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

Messages = list[dict[str, Any]]
TOOLS_VARIABLE = "tools"  # the usual variable of a template for the tools


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation for tool calls. Grammars are in the Lark dialect of llguidance."""

    name: str  # vLLM's name, if vLLM has the format
    models: str  # models that write it
    example: str  # an example call
    parser: "type[ToolParser]"
    delimiters: tuple[str, ...]  # stay in the text that the parser reads, even if they are special tokens
    # (tools, max calls, special ids) -> rules for `calls` (one call, or several if the format allows that) and for
    # `tail`, if `optional_calls` uses it: `calls` without its first delimiter.
    forced_calls: Callable[[Sequence[ToolSchema], int, SpecialIds], str]
    # special ids -> (body, rules): any text, then optionally `calls`; text that begins like a call must become a call.
    optional_calls: Callable[[SpecialIds], tuple[str, str]]
    # Texts in the instructions of a prompt with tools; they decide if a template omits earlier calls.
    marks: tuple[str, ...] = ()
    needs: str = ""  # text that distinguishes its calls from another format that its parser accepts too
    aliases: tuple[str, ...] = ()  # other names that an operator may use
    is_parsed: bool = True  # False: only forced calls can be parsed; there is no parser for the model's own
    short_call_ids: bool = False  # the template accepts only ids of nine letters and digits
    # (function, number of earlier calls in the conversation) -> call id, if the model has its own id notation
    call_id: Callable[[str, int], str] | None = None
    text_arguments: bool = False  # the template expects the arguments of earlier calls as text
    # (text, calls after it) -> model text, for templates that omit or refuse calls.
    calls_as_text: Callable[[str, list[dict[str, Any]]], str] | None = None
    # (messages, tools) -> messages that contain the tools and calls as text, for templates without tool support.
    write_into_messages: Callable[[Messages, list[dict[str, Any]] | None], Messages] | None = None
    # messages -> messages with the roles and keys that its templates have instead of `tool_calls` and role `tool`.
    own_turns: Callable[[Messages], Messages] | None = None
    tools_variable: str = TOOLS_VARIABLE  # a template variable with another name contains bare functions

    @property
    def passes_tools(self) -> bool:
        """Whether its templates get the tools in another way than in the usual variable."""
        return self.write_into_messages is not None or self.tools_variable != TOOLS_VARIABLE

    def passed(self, messages: Messages, tools: list[dict[str, Any]] | None) -> tuple[Messages, Any]:
        """Return the messages, and the tools for the template's variable, as its templates get them."""
        if self.write_into_messages is not None:
            return self.write_into_messages(messages, tools), None
        if tools and self.tools_variable != TOOLS_VARIABLE:
            return messages, [tool["function"] for tool in tools]
        return messages, tools


class ToolParser(ABC):
    """Parser of one response's calls: it searches for delimiters, or follows a call character by character."""

    DELIMITERS: tuple[str, ...]  # strings that may begin or end a call
    CLOSING: tuple[str, ...] = ()  # subset of DELIMITERS that end a call; not part of the visible text

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        """`tools`: the callable functions. Without `parallel`, everything after the first call is dropped."""
        self.scanned = 0  # characters examined
        self._tools = tools
        self._parallel = parallel
        self._pattern = re.compile("|".join(map(re.escape, self.DELIMITERS)))
        self._searching = True
        self._held = ""  # possible start of a delimiter at the end of the searched text
        self._call: CallReader | None = None
        self._closers: list[str] = []  # closing delimiters not seen since the last call
        self._rewind = ""  # end of a failed attempt, which may begin a delimiter
        self._attempt: list[str] = []  # text that is content if the attempt turns out not to be a call
        self._sink: type[ContentDelta | ReasoningDelta | ArgumentsDelta] = (
            ContentDelta  # broken arguments extend to the next delimiter
        )
        self._blank: list[str] = []  # white space that is content only if other characters follow
        self._has_words = False  # content has been seen since the start or the last call
        self._num_calls = 0

    def push(self, text: str) -> list[MessageEvent]:
        """Return the events that this piece of text completes."""
        events: list[MessageEvent] = []
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            if self._searching:
                position = self._search(text, position, events)
            else:
                self.scanned += 1
                position += self._on_character(text[position], events)
                if self._rewind:
                    text, position = self._again(text, position)
        return merged(self._without_packing(events))

    def flush(self, is_ended: bool = False) -> list[MessageEvent]:
        """Return the events of the text that was held back, at the end of the output.

        `is_ended`: the model has ended its output, so a call that lacks only its closing tags is complete.
        """
        rest: list[MessageEvent] = [ContentDelta("".join(self._attempt)), self._sink(self._held)]
        if is_ended and self._call is not None:
            rest += self._call.finish()
        self._attempt, self._held = [], ""
        events = self._without_packing(rest)
        blank, self._blank = "".join(self._blank), []
        return merged([*events, ContentDelta("" if self._num_calls else blank)])

    @property
    def num_undecided(self) -> int:
        """Number of characters at the end of the text so far that are held back, if no call has been announced."""
        return len(self._held) + sum(map(len, self._attempt)) + sum(map(len, self._blank))

    @property
    def is_broken(self) -> bool:
        """Whether the last call's arguments ended in text that cannot be part of them."""
        return self._sink is ArgumentsDelta

    def _again(self, text: str, position: int) -> tuple[str, int]:
        """Step back over the end of a failed attempt; return the text and the position to continue at."""
        size, rewind = len(self._rewind), self._rewind
        self._rewind = ""
        return (text, position - size) if position >= size else (rewind[: size - position] + text, 0)

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        """Handle a delimiter. To follow the text after it, call `_begin_call` or clear `_searching`."""
        if delimiter not in self.CLOSING:
            self._closers = []
            self._begin_call(delimiter, self._reader(delimiter))
        elif delimiter in self._closers:
            self._closers.remove(delimiter)
        else:
            events.append(ContentDelta(delimiter))

    @abstractmethod
    def _reader(self, delimiter: str) -> CallReader:
        """Create the reader of the call after this delimiter."""

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        """Follow one character. Return False if it was not consumed and must be examined again."""
        return self._abandon_call(events) if self._call is None else self._follow_call(self._call, character, events)

    def _search(self, text: str, position: int, events: list[MessageEvent]) -> int:
        """Look for the next delimiter; return the new position."""
        found = self._pattern.search(text, position)
        end = found.end() if found else len(text)
        self.scanned += end - position
        if found is None:
            keep = self._partial(text, position)
            self._pass_on(text[position : end - keep], events)
            self._held = text[end - keep :]
        else:
            self._pass_on(text[position : found.start()], events)
            self._sink = ContentDelta
            self._on_delimiter(found[0], events)
        return end

    def _pass_on(self, text: str, events: list[MessageEvent]) -> None:
        """Emit searched text without delimiters."""
        events.append(self._sink(text))
        if self._closers and self._sink is ContentDelta and text.strip():
            self._closers = []

    def _partial(self, text: str, position: int) -> int:
        """Return the number of characters at the end of `text` that may begin a delimiter."""
        most = max(map(len, self.DELIMITERS)) - 1
        for size in range(min(most, len(text) - position), 0, -1):
            if any(delimiter.startswith(text[-size:]) for delimiter in self.DELIMITERS):
                return size
        return 0

    def _begin_call(self, attempt: str, reader: CallReader) -> None:
        """Expect a call from here on; `attempt` is content if there is no call."""
        self._searching = False
        self._call = reader
        self._attempt = [attempt]

    def _follow_call(self, call: CallReader, character: str, events: list[MessageEvent]) -> bool:
        """Follow one character inside the current call. Return False if it was not consumed."""
        try:
            events += call.push(character)
        except NoCallError:
            return self._abandon_call(events)
        if not call.announced:
            self._attempt.append(character)
            return True
        self._attempt = []
        if call.done or call.broken:
            self._call = None
            self._searching = True
            self._rewind = call.rest
            self._closers = list(self.CLOSING)
            self._sink = ArgumentsDelta if call.broken else ContentDelta
        return True

    def _abandon_call(self, events: list[MessageEvent]) -> bool:
        """Emit the failed attempt as content. The character at which it failed has not been consumed."""
        attempt = "".join(self._attempt)
        keep = self._partial(attempt, 1)
        self._rewind = attempt[len(attempt) - keep :]
        events.append(ContentDelta(attempt[: len(attempt) - keep]))
        self._attempt, self._call = [], None
        self._searching = True
        return False

    def _without_packing(self, events: list[MessageEvent]) -> list[MessageEvent]:
        """Drop the white space around calls and, unless several calls are allowed, everything after the first call."""
        kept: list[MessageEvent] = []
        for event in events:
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
                self._blank, self._has_words = [], False
            elif isinstance(event, ContentDelta):
                if self._num_calls and not self._parallel:
                    continue
                if not self._has_words and not event.text.strip():
                    self._blank.append(event.text)
                    continue
                event = ContentDelta("".join([*self._blank, event.text]))
                self._blank, self._has_words = [], True
            if self._parallel or self._num_calls < 2:
                kept.append(event)
        return kept
