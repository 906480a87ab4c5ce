"""Events that a parser finds in the text of an answer: content, reasoning, and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the last call's arguments."""

    text: str


MessageEvent = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def merged(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Joins neighbouring events of one kind, and leaves out those without text."""
    result: list[MessageEvent] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            _close(result, texts)
            result.append(event)
        elif event.text:
            if not (texts and result and type(result[-1]) is type(event)):
                _close(result, texts)
                result.append(event)
            texts.append(event.text)
    _close(result, texts)
    return result


def _close(result: list[MessageEvent], texts: list[str]) -> None:
    """Give the last event the text that was gathered for it."""
    if len(texts) > 1:
        result[-1] = type(result[-1])("".join(texts))
    texts.clear()
