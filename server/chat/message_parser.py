"""The pieces of a choice's text as a message grows from them: thoughts, content, calls, and how it ended.

Streams and plain answers read through the same state, so they cannot differ. Knows what the request allows; knows
nothing of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import FinishReason
from server.chat.events import CallStart, Content, Event, merged
from server.chat.reasoning_parser import ReasoningParser
from server.chat.tool_choice import ToolPlan
from server.llm.output_processor import Delta

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What may be in an answer beside plain text."""

    may_think: bool = False
    is_thinking: bool = False
    tools: ToolPlan | None = None

    @property
    def is_plain(self) -> bool:
        return not (self.may_think or self.is_thinking or self.tools)


class MessageParser:
    """One choice's message as it grows."""

    def __init__(self, shape: AnswerShape) -> None:
        thinks = shape.may_think or shape.is_thinking
        self._splitter = ReasoningParser(shape.is_thinking) if thinks else None
        self._tools = shape.tools.reader() if shape.tools else None
        self._is_named = shape.tools is not None and shape.tools.is_named
        self._only_calls = shape.tools is not None and shape.tools.must_call
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        return self._splitter.num_tokens if self._splitter else 0

    def read(self, delta: Delta) -> list[Event]:
        """What one piece of the choice's text completes."""
        events: list[Event] = [Content(delta.text)]
        if self._splitter is not None:
            events = self._splitter.push(delta.text, delta.num_tokens)
            if delta.finish_reason is not None:
                events = merged([*events, *self._splitter.flush()])
        if self._tools is not None:
            read: list[Event] = []
            for event in events:
                read += self._tools.push(event.text) if isinstance(event, Content) else [event]
            if delta.finish_reason is not None:
                read += self._tools.flush()
            # Where calls are forced, the rest is their packing, or the beginning of one that was cut short.
            events = [event for event in read if not (self._only_calls and isinstance(event, Content))]
        self._num_calls += sum(isinstance(event, CallStart) for event in events)
        return merged(events)

    def finish_reason(self, delta: Delta) -> str | None:
        """Why the message ended. A message cut short says so even if it holds calls."""
        called = self._num_calls > 0 and not self._is_named
        return TOOL_CALLS if called and delta.finish_reason == FinishReason.STOP.value else delta.finish_reason
