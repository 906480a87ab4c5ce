"""Finds the tokens of an answer that are its visible text, apart from those of reasoning, calls and their tags.

Each token is parsed by itself, as a piece of an answer may hold many. Knows the parser of messages, not the wire.
"""

from collections.abc import Iterable

from oarlock.server.chat.message_parser import AnswerShape, MessageParser
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta
from oarlock.server.llm.detokenizer import Detokenizer
from oarlock.server.llm.output_processor import Delta, TokenScore


class VisibleTokens:
    """Filters the tokens of one answer as they come."""

    def __init__(self, shape: AnswerShape, detokenizer: Detokenizer) -> None:
        self._parser = MessageParser(shape, in_items=True)
        self._detokenizer = detokenizer
        self._recent: list[tuple[TokenScore, str]] = []  # since the last event, each with its text

    def push(self, scores: Iterable[TokenScore]) -> list[TokenScore]:
        """Return those of the next tokens, and of tokens held back before, that are visible text."""
        found: list[TokenScore] = []
        for score in scores:
            text = self._detokenizer.push([score.token_id])
            self._recent.append((score, text))
            events = self._parser.push(Delta(0, text, num_tokens=1))
            shown = sum(len(event.text) for event in events if isinstance(event, ContentDelta))
            if shown:
                found += self._last(shown)
            if events:
                self._recent = []
        return found

    def _last(self, num_characters: int) -> list[TokenScore]:
        """The newest tokens that make up so many characters: a text may have waited for the rest of a tag."""
        start = len(self._recent)
        while start and num_characters > 0:
            start -= 1
            num_characters -= len(self._recent[start][1])
        return [score for score, _ in self._recent[start:]]
