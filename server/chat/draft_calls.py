"""Finds out whether a call inside the thoughts is one: some models call a function and never close their thoughts.

A call that ends the answer ends the thoughts too. One that other words or the end of the thoughts follow is a draft,
and stays part of them. So a call is held back until that is known: no more than the calls themselves, and white space.
Text that only begins like a call is passed on as soon as it cannot become one.
"""

from oarlock.server.chat.tool_parsers.base import ToolParser
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta, ToolCallStart


class DraftCalls:
    """Thoughts as they grow, without the calls that may end them."""

    def __init__(self, parser: ToolParser) -> None:
        """`parser`: of the model's calls; it must read several of them."""
        self._parser = parser
        self._parser.push("-")  # a call must not be recognised by its place at the beginning of the answer
        self._first = {text[0] for text in parser.DELIMITERS if text not in parser.CLOSING}
        self._held = ""  # from the beginning of a possible call on
        self._is_call = False  # its name and the beginning of its arguments have come
        self._num_tokens = 0  # of the pieces since then

    @property
    def held_tokens(self) -> int:
        """Tokens of a call that is held back: they are no thoughts if it ends the answer."""
        return self._num_tokens if self._is_call else 0

    def push(self, text: str, num_tokens: int = 0) -> str:
        """The thoughts that this piece completes."""
        if not self._held and self._first.isdisjoint(text):
            return text
        shown: list[str] = []
        for character in text:
            shown.append(self._push(character))
        if self._is_call:
            self._num_tokens += num_tokens
        return "".join(shown)

    def _push(self, character: str) -> str:
        if not self._held and character not in self._first:
            return character
        self._held += character
        events = self._parser.push(character)
        has_words = any(isinstance(event, ContentDelta) and event.text.strip() for event in events)
        if any(isinstance(event, ToolCallStart) for event in events):
            self._is_call = True
        elif has_words or self._parser.is_broken:
            self._is_call = False
        if self._is_call or (not has_words and self._parser.num_undecided == len(self._held)):
            return ""
        size = len(self._held) - self._parser.num_undecided
        shown, self._held = self._held[:size], self._held[size:]
        self._num_tokens = 0
        return shown

    def close(self) -> str:
        """The rest of the thoughts, when they are closed: a call in them is a draft."""
        held, self._held, self._is_call = self._held, "", False
        return held

    def end(self) -> tuple[str, str]:
        """Returns (the rest of the thoughts, the calls that ended them), when the answer ends."""
        is_call, held = self._is_call, self.close()
        return ("", held) if is_call else (held, "")
