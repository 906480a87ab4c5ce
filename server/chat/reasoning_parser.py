"""Separates what a model thinks (`<think>…</think>`) from what it answers, piece by piece.

Line ends next to the marks belong to the marks, as templates write them. A mark that comes later than at the start is
text. Knows the marks; does not know which models use them (`chat_prompt` finds out).
"""

from __future__ import annotations

from server.chat.events import Content, Event, Reasoning, merged

OPEN, CLOSE = "<think>", "</think>"
_START, _INSIDE, _BEHIND, _ANSWER = range(4)


class ReasoningParser:
    """The state of one answer. Holds back no more than a piece of a mark and the white space before it."""

    def __init__(self, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the thoughts already."""
        self._state = _INSIDE if is_open else _START
        self._held = ""  # what may be the beginning of a mark
        self._blank: list[str] = []  # white space that is shown only if something else follows
        self._thinks = is_open  # there are thoughts in this answer
        self._began = False  # their first character has come: line ends count from here on
        self._num_undecided = 0
        self.num_tokens = 0  # of the thoughts and their marks

    def push(self, text: str, num_tokens: int = 0) -> list[Event]:
        """What this piece of text, made of so many tokens, completes."""
        before = self._state
        events: list[Event] = []
        text, self._held = self._held + text, ""
        for read in (self._at_start, self._inside, self._behind, self._answer):
            text = read(text, events)
        if before == _START:
            self._num_undecided += num_tokens
            self.num_tokens = self._num_undecided if self._thinks else 0
        elif before == _INSIDE:
            self.num_tokens += num_tokens
        return merged(events)

    def flush(self) -> list[Event]:
        """What was held back, when no more text comes."""
        held, blank = self._held, "".join(self._blank)
        self._held, self._blank = "", []
        if self._state == _INSIDE:
            return merged([Reasoning(blank + held)] if held else [])
        return merged([Content(blank + held if self._state == _START else held)])

    def _at_start(self, text: str, events: list[Event]) -> str:
        if self._state != _START or not text:
            return text
        words = text.lstrip()
        self._blank.append(text[: len(text) - len(words)])
        if words.startswith(OPEN):
            self._state, self._thinks, self._blank = _INSIDE, True, []
            return words[len(OPEN) :]
        if OPEN.startswith(words):
            self._held = words
            return ""
        self._state = _ANSWER
        events.append(Content("".join(self._blank)))
        self._blank = []
        return words

    def _inside(self, text: str, events: list[Event]) -> str:
        if self._state != _INSIDE or not text:
            return text
        end = text.find(CLOSE)
        thought = text[: end if end >= 0 else len(text) - _partial(text)]
        self._think(thought, events)
        if end < 0:
            self._held = text[len(thought) :]
            return ""
        self._blank = []
        self._state = _BEHIND
        return text[end + len(CLOSE) :]

    def _think(self, thought: str, events: list[Event]) -> None:
        """Hand out thoughts without the line ends around them."""
        if not self._began:
            thought = thought.lstrip("\n")
        if not thought:
            return
        self._began = True
        words = thought.rstrip("\n")
        if words:
            events.append(Reasoning("".join(self._blank) + words))
            self._blank = []
        self._blank.append(thought[len(words) :])

    def _behind(self, text: str, events: list[Event]) -> str:
        if self._state != _BEHIND:
            return text
        text = text.lstrip("\n")
        if text:
            self._state = _ANSWER
        return text

    def _answer(self, text: str, events: list[Event]) -> str:
        if self._state == _ANSWER and text:
            events.append(Content(text))
        return ""


def _partial(text: str) -> int:
    """How many characters at the end may be the beginning of the closing mark."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-size:]):
            return size
    return 0
