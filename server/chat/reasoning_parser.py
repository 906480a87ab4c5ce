"""Separates what a model thinks (`<think>…</think>`) from what it answers, piece by piece.

Line ends next to the tags belong to the tags, as templates write them. `<think>` anywhere but at the start is text.
Whether a model uses these tags is found out in `prompt.py`.
"""

from __future__ import annotations

from server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, merged

THINK_START, THINK_END = "<think>", "</think>"
_START, _INSIDE, _BEHIND, _ANSWER = range(4)


class ReasoningParser:
    """The state of one answer. Holds back no more than a piece of a tag and the white space before it."""

    def __init__(self, is_open: bool) -> None:
        """`is_open`: the prompt ends inside the thoughts already."""
        self._state = _INSIDE if is_open else _START
        self._held = ""  # what may be the beginning of a tag
        self._blank: list[str] = []  # white space that is text only if something else follows
        self._thinks = is_open  # there are thoughts in this answer
        self._began = False  # their first character has come: line ends count from here on
        self._num_undecided = 0
        self.num_tokens = 0  # of the thoughts and their tags

    def push(self, text: str, num_tokens: int = 0) -> list[MessageEvent]:
        """The events that this piece of text, made of so many tokens, completes."""
        before = self._state
        events: list[MessageEvent] = []
        text, self._held = self._held + text, ""
        for parse in (self._at_start, self._inside, self._behind, self._answer):
            text = parse(text, events)
        if before == _START:
            self._num_undecided += num_tokens
            self.num_tokens = self._num_undecided if self._thinks else 0
        elif before == _INSIDE:
            self.num_tokens += num_tokens
        return merged(events)

    def flush(self) -> list[MessageEvent]:
        """The events of what was held back, when no more text comes."""
        held, blank = self._held, "".join(self._blank)
        self._held, self._blank = "", []
        if self._state == _INSIDE:
            return merged([ReasoningDelta(blank + held)] if held else [])
        return merged([ContentDelta(blank + held if self._state == _START else held)])

    def _at_start(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _START or not text:
            return text
        words = text.lstrip()
        self._blank.append(text[: len(text) - len(words)])
        if words.startswith(THINK_START):
            self._state, self._thinks, self._blank = _INSIDE, True, []
            return words[len(THINK_START) :]
        if THINK_START.startswith(words):
            self._held = words
            return ""
        self._state = _ANSWER
        events.append(ContentDelta("".join(self._blank)))
        self._blank = []
        return words

    def _inside(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _INSIDE or not text:
            return text
        end = text.find(THINK_END)
        thought = text[: end if end >= 0 else len(text) - _partial(text)]
        self._think(thought, events)
        if end < 0:
            self._held = text[len(thought) :]
            return ""
        self._blank = []
        self._state = _BEHIND
        return text[end + len(THINK_END) :]

    def _think(self, thought: str, events: list[MessageEvent]) -> None:
        """Emit thoughts without the line ends around them."""
        if not self._began:
            thought = thought.lstrip("\n")
        if not thought:
            return
        self._began = True
        words = thought.rstrip("\n")
        if words:
            events.append(ReasoningDelta("".join(self._blank) + words))
            self._blank = []
        self._blank.append(thought[len(words) :])

    def _behind(self, text: str, events: list[MessageEvent]) -> str:
        if self._state != _BEHIND:
            return text
        text = text.lstrip("\n")
        if text:
            self._state = _ANSWER
        return text

    def _answer(self, text: str, events: list[MessageEvent]) -> str:
        if self._state == _ANSWER and text:
            events.append(ContentDelta(text))
        return ""


def _partial(text: str) -> int:
    """How many characters at the end may be the beginning of the closing tag."""
    for size in range(min(len(THINK_END) - 1, len(text)), 0, -1):
        if THINK_END.startswith(text[-size:]):
            return size
    return 0
