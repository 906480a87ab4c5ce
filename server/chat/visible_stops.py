"""Search for stop strings in the visible text of a response: not in reasoning, and not in calls.

A client that sends `stop` refers to the text that it sees. Reasoning may be hidden from it, and a call that is cut at a
stop string has invalid arguments. So the text is parsed first, and only its content is searched. No stop string matches
across reasoning or a call.
"""

from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta, MessageEvent
from oarlock.server.llm.detokenizer import StopStringMatcher, StopStrings
from oarlock.server.llm.output_processor import ReadText


class VisibleStops:
    """Parser of one choice's text that ends at a stop string (implements `StopFinder`)."""

    def __init__(self, shape: MessageShape, in_items: bool, stops: StopStrings, include: bool) -> None:
        """`in_items`: see `MessageParser`. `include`: the stop string is part of the response."""
        self._parser = MessageParser(shape, in_items=in_items)
        self._matcher = StopStringMatcher(stops, include)
        self._events: list[MessageEvent] = []  # events since the last `take`

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Parse the text of one token."""
        return "", self._pass_on(self._parser.read(text, 1, is_last=False), may_end)

    def finish(self, text: str, is_ended: bool) -> tuple[str, str | None]:
        """Parse the last text, which belongs to earlier tokens."""
        found = self._pass_on(self._parser.read(text, 0, is_last=True, is_ended=is_ended), True)
        self._events.append(ContentDelta(self._matcher.flush()))
        return "", found

    def take(self) -> ReadText:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return ReadText(events, self._parser.reasoning_tokens)

    def _pass_on(self, events: list[MessageEvent], may_end: bool) -> str | None:
        for event in events:
            if self._matcher.found is not None:
                break
            if isinstance(event, ContentDelta):
                self._events.append(ContentDelta(self._matcher.push(event.text, may_end)[0]))
            else:
                self._events += [ContentDelta(self._matcher.flush()), event]
        return self._matcher.found
