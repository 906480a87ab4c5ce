"""Parses a choice's text into a message: reasoning, content, tool calls, and the reason of its end.

Streams and whole answers use the same parser, so they cannot differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.engine.types import FinishReason
from oarlock.server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, ToolCallStart, merged
from oarlock.server.chat.reasoning_parser import THINK, ReasoningFormat, ReasoningParser
from oarlock.server.chat.tool_choice import ToolChoice
from oarlock.server.chat.tool_parsers.harmony import HarmonyParser
from oarlock.server.llm.output_processor import Delta

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Parts that an answer may have beside plain text: thoughts, tool calls, messages of Harmony."""

    may_think: bool = False
    is_thinking: bool = False
    tool_choice: ToolChoice | None = None
    reasoning: ReasoningFormat = THINK
    harmony: str | None = None  # for answers in Harmony: what the prompt holds of this one

    @property
    def is_plain(self) -> bool:
        """Whether the text of the answer is its content, with nothing to parse."""
        return not (self.may_think or self.is_thinking or self.tool_choice or self.harmony is not None)


class MessageParser:
    """One choice's message as it grows."""

    def __init__(self, shape: AnswerShape, *, in_items: bool = False) -> None:
        """`in_items`: thoughts, texts and calls are shown in the order that they came in, not one text of each kind."""
        thinks = (shape.may_think or shape.is_thinking) and shape.harmony is None
        choice = shape.tool_choice
        self._reasoning_parser = ReasoningParser(shape.is_thinking, shape.reasoning) if thinks else None
        self._tool_parser = choice.parser() if choice else None
        self._thought_tokens = 0  # of an answer in Harmony, whose thoughts the tool parser reads
        if shape.harmony is not None:
            messages = self._tool_parser if isinstance(self._tool_parser, HarmonyParser) else HarmonyParser({})
            messages.thoughts = ReasoningDelta if shape.may_think else ContentDelta
            messages.in_items = in_items
            messages.push(shape.harmony)
            self._tool_parser = messages
        self._is_named = choice is not None and choice.is_named
        self._only_calls = choice is not None and choice.must_call
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far, its tags included."""
        return self._reasoning_parser.num_tokens if self._reasoning_parser else self._thought_tokens

    def push(self, delta: Delta) -> list[MessageEvent]:
        """The events that one piece of the choice's text completes."""
        events: list[MessageEvent] = [ContentDelta(delta.text)]
        if self._reasoning_parser is not None:
            events = self._reasoning_parser.push(delta.text, delta.num_tokens)
            if delta.finish_reason is not None:
                events = merged([*events, *self._reasoning_parser.flush()])
        if self._tool_parser is not None:
            parsed: list[MessageEvent] = []
            for event in events:
                parsed += self._tool_parser.push(event.text) if isinstance(event, ContentDelta) else [event]
            if delta.finish_reason is not None:
                parsed += self._tool_parser.flush()
            if any(isinstance(event, ReasoningDelta) for event in parsed) and self._reasoning_parser is None:
                self._thought_tokens += delta.num_tokens
            # Where calls are forced, the rest is their packing, or the beginning of one that was cut short.
            events = [event for event in parsed if not (self._only_calls and isinstance(event, ContentDelta))]
        self._num_calls += sum(isinstance(event, ToolCallStart) for event in events)
        return merged(events)

    def finish_reason(self, delta: Delta) -> str | None:
        """Finish reason of the message: `tool_calls` if it has calls, is not cut short, and no function was named."""
        called = self._num_calls > 0 and not self._is_named
        return TOOL_CALLS if called and delta.finish_reason == FinishReason.STOP.value else delta.finish_reason
