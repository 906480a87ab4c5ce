"""Selection of the visible tokens of a response, without the tokens of reasoning, calls and their tags.

Each token is parsed separately, since a piece of a response may contain many. Knows the message parser, not the HTTP
format.
"""

from collections.abc import Iterable

from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta
from oarlock.server.llm.detokenizer import Detokenizer
from oarlock.server.llm.output_processor import Delta, TokenScore


class VisibleTokens:
    """Incremental filter of the tokens of one response."""

    def __init__(self, shape: MessageShape, detokenizer: Detokenizer) -> None:
        self._parser = MessageParser(shape, in_items=True)
        self._detokenizer = detokenizer
        self._recent: list[tuple[TokenScore, str]] = []  # tokens since the last event, each with its text

    def push(self, scores: Iterable[TokenScore]) -> list[TokenScore]:
        """Return the visible tokens among these tokens and the tokens that were held back before."""
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
        """Return the newest tokens that contain `num_characters`: a text may have waited for the rest of a tag."""
        start = len(self._recent)
        while start and num_characters > 0:
            start -= 1
            num_characters -= len(self._recent[start][1])
        return [score for score, _ in self._recent[start:]]
