"""Base of all tool-call formats: the description of one (`ToolFormat`) and its parser (`ToolParser`).

A parser reads a model's text as it grows. What is not a call is content, character for character; so is a beginning
that never became a call. A character is looked at a bounded number of times (`scanned` counts), and how the text is cut
into pieces does not matter.
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


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls. Grammars are in the Lark dialect of llguidance."""

    name: str  # vLLM's, where it has the format
    models: str  # that write it
    example: str  # a call
    parser: "type[ToolParser]"
    delimiters: tuple[str, ...]  # kept in the text that the parser reads, even where they are special tokens
    # (tools, most calls, special ids) -> rules for `calls`: one call of one of the tools, or several where the format
    # has a way; and for `tail`, the same without the delimiter that begins it, where `optional_calls` uses it.
    forced_calls: Callable[[Sequence[ToolSchema], int, SpecialIds], str]
    # special ids -> (body, rules): any text, and then perhaps `calls`; what begins like a call becomes one.
    optional_calls: Callable[[SpecialIds], tuple[str, str]]
    # Texts in the instructions of a prompt with tools: they decide if a template leaves out a conversation's calls.
    marks: tuple[str, ...] = ()
    needs: str = ""  # a text that tells its calls from those of another format that its parser reads too
    aliases: tuple[str, ...] = ()  # other names by which an operator may choose it
    is_parsed: bool = True  # False: only forced calls can be parsed, the model's own have no parser here
    short_call_ids: bool = False  # the template accepts ids of nine letters and digits only
    # (function, number of calls before it in the conversation) -> the id of a call, where the model writes and reads
    # ids in a notation of its own
    call_id: Callable[[str, int], str] | None = None
    text_arguments: bool = False  # the template takes those of earlier calls as the text they were
    # Writes a text and earlier calls behind it as the model's own text, for templates that leave out or refuse calls.
    calls_as_text: Callable[[str, list[dict[str, Any]]], str] | None = None
    # For templates that know nothing of tools: the messages, with the tools and calls in their text.
    write_into_messages: Callable[[Messages, list[dict[str, Any]] | None], Messages] | None = None


class ToolParser(ABC):
    """Parser of one answer's calls: it searches the text for delimiters, or follows a call by its characters."""

    DELIMITERS: tuple[str, ...]  # those that may begin a call, or end one
    CLOSING: tuple[str, ...] = ()  # those of them that end one, and are packing where they do

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        """`tools` are the callable functions; without `parallel`, whatever follows the first call is left out."""
        self.scanned = 0  # characters looked at
        self._tools = tools
        self._parallel = parallel
        self._pattern = re.compile("|".join(map(re.escape, self.DELIMITERS)))
        self._searching = True
        self._held = ""  # the end of the searched text, while it may be the beginning of a delimiter
        self._call: CallReader | None = None
        self._closers: list[str] = []  # that have not come since the last call
        self._rewind = ""  # the end of an attempt that was no call: it may begin a delimiter
        self._attempt: list[str] = []  # what is content if it turns out to be no call
        self._sink: type[ContentDelta | ReasoningDelta | ArgumentsDelta] = (
            ContentDelta  # broken arguments last to the next delimiter
        )
        self._blank: list[str] = []  # white space that is content only if other characters follow
        self._has_words = False  # since the start, or since the last call
        self._num_calls = 0

    def push(self, text: str) -> list[MessageEvent]:
        """The events that this piece of text completes."""
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
        """The events of the text that was held back, when no more text comes.

        `is_ended`: the model has ended its answer, so that a call that lacks only its last tags is complete.
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
        """Whether the last call's arguments have ended in text that cannot be part of them."""
        return self._sink is ArgumentsDelta

    def _again(self, text: str, position: int) -> tuple[str, int]:
        """Step back over the end of an attempt that was no call; returns the text and the position to go on from."""
        size, rewind = len(self._rewind), self._rewind
        self._rewind = ""
        return (text, position - size) if position >= size else (rewind[: size - position] + text, 0)

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        """A delimiter was found. To follow what comes after it, call `_begin_call` or clear `_searching`."""
        if delimiter not in self.CLOSING:
            self._closers = []
            self._begin_call(delimiter, self._reader(delimiter))
        elif delimiter in self._closers:
            self._closers.remove(delimiter)
        else:
            events.append(ContentDelta(delimiter))

    @abstractmethod
    def _reader(self, delimiter: str) -> CallReader:
        """Creates the reader of the call behind this delimiter."""

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        """Follow one character. False: it was not consumed, and is looked at again."""
        return self._give_up(events) if self._call is None else self._follow_call(self._call, character, events)

    def _search(self, text: str, position: int, events: list[MessageEvent]) -> int:
        """Look for the next delimiter; the new position."""
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
        """Emit searched text, which has no delimiter in it."""
        events.append(self._sink(text))
        if self._closers and self._sink is ContentDelta and text.strip():
            self._closers = []

    def _partial(self, text: str, position: int) -> int:
        """Number of characters at the end of `text` that may begin a delimiter."""
        most = max(map(len, self.DELIMITERS)) - 1
        for size in range(min(most, len(text) - position), 0, -1):
            if any(delimiter.startswith(text[-size:]) for delimiter in self.DELIMITERS):
                return size
        return 0

    def _begin_call(self, attempt: str, reader: CallReader) -> None:
        """Expect a call from here on; `attempt` is content if none comes."""
        self._searching = False
        self._call = reader
        self._attempt = [attempt]

    def _follow_call(self, call: CallReader, character: str, events: list[MessageEvent]) -> bool:
        """Follow one character inside the current call. False: it was not consumed."""
        try:
            events += call.push(character)
        except NoCallError:
            return self._give_up(events)
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

    def _give_up(self, events: list[MessageEvent]) -> bool:
        """The attempt was no call: it is content. The character that showed it has not been consumed."""
        attempt = "".join(self._attempt)
        keep = self._partial(attempt, 1)
        self._rewind = attempt[len(attempt) - keep :]
        events.append(ContentDelta(attempt[: len(attempt) - keep]))
        self._attempt, self._call = [], None
        self._searching = True
        return False

    def _without_packing(self, events: list[MessageEvent]) -> list[MessageEvent]:
        """Drop the white space around calls and, where only one call may come, all that follows it."""
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
