"""Reads the calls in a model's text as it grows: what every way of writing them has in common, and the Hermes way.

Whatever is not a call is content, character for character; so is a beginning that never became one. Every character is
looked at a bounded number of times (`scanned` counts), and how the text is cut into pieces never matters. Knows the
marks of formats; knows nothing of templates, grammars or JSON answers.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from server.chat.events import Arguments, CallStart, Content, Event, merged
from server.chat.tool_parsers.call_parser import CallReader, NoCallError


class ToolParser(ABC):
    """The state of one answer: it either searches the text for marks, or follows a call character by character."""

    MARKS: tuple[str, ...]

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        """`names` may be called; without `parallel` only the first call counts, and whatever follows it is left out."""
        self.scanned = 0  # characters looked at
        self._names = names
        self._parallel = parallel
        self._pattern = re.compile("|".join(map(re.escape, self.MARKS)))
        self._searching = True
        self._held = ""  # the end of the searched text, while it may be the beginning of a mark
        self._call: CallReader | None = None
        self._attempt: list[str] = []  # what is content if it turns out to be no call
        self._sink: type[Content | Arguments] = Content  # arguments that went wrong go on to the next mark
        self._blank: list[str] = []  # white space that is shown only if words follow
        self._has_words = False  # since the start, or since the last call
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """What this piece of text completes."""
        events: list[Event] = []
        text, self._held = self._held + text, ""
        position = 0
        while position < len(text):
            if self._searching:
                position = self._search(text, position, events)
            else:
                self.scanned += 1
                position += self._step(text[position], events)
        return merged(self._gate(events))

    def flush(self) -> list[Event]:
        """What was held back, when no more text comes."""
        rest: list[Event] = [Content("".join(self._attempt)), self._sink(self._held)]
        self._attempt, self._held = [], ""
        events = self._gate(rest)
        blank, self._blank = "".join(self._blank), []
        return merged([*events, Content("" if self._num_calls else blank)])

    @abstractmethod
    def _mark(self, mark: str, events: list[Event]) -> None:
        """A mark was found."""

    @abstractmethod
    def _step(self, character: str, events: list[Event]) -> bool:
        """Follow one character. False: it was not taken in, and from here on the text is searched again."""

    def _search(self, text: str, position: int, events: list[Event]) -> int:
        """Look for the next mark; the new position."""
        found = self._pattern.search(text, position)
        end = found.end() if found else len(text)
        self.scanned += end - position
        if found is None:
            keep = self._partial(text, position)
            events.append(self._sink(text[position : end - keep]))
            self._held = text[end - keep :]
        else:
            events.append(self._sink(text[position : found.start()]))
            self._sink = Content
            self._mark(found[0], events)
        return end

    def _partial(self, text: str, position: int) -> int:
        """How many characters at the end may be the beginning of a mark."""
        most = max(map(len, self.MARKS)) - 1
        for size in range(min(most, len(text) - position), 0, -1):
            if any(mark.startswith(text[-size:]) for mark in self.MARKS):
                return size
        return 0

    def _begin_call(self, attempt: str, name: str | None = None) -> None:
        self._searching = False
        self._call = CallReader(self._names, name)
        self._attempt = [attempt]

    def _step_call(self, call: CallReader, character: str, events: list[Event]) -> bool:
        """One character of the current call."""
        try:
            events += call.step(character)
        except NoCallError:
            return self._give_up(events)
        if not call.announced:
            self._attempt.append(character)
            return True
        self._attempt = []
        if call.done or call.broken:
            self._call = None
            self._searching = True
            self._sink = Arguments if call.broken else Content
        return True

    def _give_up(self, events: list[Event]) -> bool:
        """The attempt was no call: it is content. The character that showed it has not been taken in."""
        events.append(Content("".join(self._attempt)))
        self._attempt, self._call = [], None
        self._searching = True
        return False

    def _gate(self, events: list[Event]) -> list[Event]:
        """White space around calls is their packing, not part of the answer."""
        shown: list[Event] = []
        for event in events:
            if isinstance(event, CallStart):
                self._num_calls += 1
                self._blank, self._has_words = [], False
            elif isinstance(event, Content):
                if self._num_calls and not self._parallel:
                    continue
                if not self._has_words and not event.text.strip():
                    self._blank.append(event.text)
                    continue
                event = Content("".join([*self._blank, event.text]))
                self._blank, self._has_words = [], True
            if self._parallel or self._num_calls < 2:
                shown.append(event)
        return shown


class HermesToolParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as the model likes: Qwen, Hermes and others."""

    MARKS = ("<tool_call>", "</tool_call>")

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__(names, parallel)
        self._unclosed = False  # a call is complete and its end mark has not come

    def _mark(self, mark: str, events: list[Event]) -> None:
        if mark == self.MARKS[0]:
            self._begin_call(mark)
        elif not self._unclosed:
            events.append(Content(mark))
        self._unclosed = False

    def _step(self, character: str, events: list[Event]) -> bool:
        call = self._call
        if call is None:
            return self._give_up(events)
        taken = self._step_call(call, character, events)
        self._unclosed = call.announced
        return taken
