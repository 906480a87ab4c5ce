"""Detection of calls inside unclosed reasoning: some models call a function without closing their reasoning first.

A call at the end of the output also ends the reasoning. A call that is followed by other text or by the end of the
reasoning is a draft and stays part of the reasoning. So calls, and white space after them, are held back until that is
decided. Text that only begins like a call is released as soon as it cannot become a call.
"""

from oarlock.server.chat.tool_parsers.base import ToolParser
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta, ToolCallStart


class DraftCalls:
    """Stream of reasoning text that holds back the calls that may end the reasoning."""

    def __init__(self, parser: ToolParser) -> None:
        """`parser`: parser of the model's calls; it must accept several calls."""
        self._parser = parser
        self._parser.push("-")  # the parser must not recognise a call by its position at the start of the output
        self._first = {text[0] for text in parser.DELIMITERS if text not in parser.CLOSING}
        self._held = ""  # text since the start of a possible call
        self._is_call = False  # the name and the start of the arguments have been parsed
        self._num_tokens = 0  # number of tokens since `_is_call` was set

    @property
    def held_tokens(self) -> int:
        """Number of tokens of a call that is held back; they are not reasoning tokens if the call ends the output."""
        return self._num_tokens if self._is_call else 0

    def push(self, text: str, num_tokens: int = 0) -> str:
        """Return the reasoning text that this piece releases."""
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
        """Return the rest of the reasoning when it is closed: a call in it is a draft."""
        held, self._held, self._is_call = self._held, "", False
        return held

    def end(self) -> tuple[str, str]:
        """Return (the rest of the reasoning, the calls that ended it) at the end of the output."""
        is_call, held = self._is_call, self.close()
        return ("", held) if is_call else (held, "")
