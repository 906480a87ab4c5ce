"""What a reader finds in the text of an answer: words for the person, thoughts, and calls.

Plain values; they know nothing of how any model writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined, empty ones left out."""
    result: list[Event] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, CallStart):
            _close(result, texts)
            result.append(event)
        elif event.text:
            if not (texts and result and type(result[-1]) is type(event)):
                _close(result, texts)
                result.append(event)
            texts.append(event.text)
    _close(result, texts)
    return result


def _close(result: list[Event], texts: list[str]) -> None:
    """Give the last event the text that was gathered for it."""
    if len(texts) > 1:
        result[-1] = type(result[-1])("".join(texts))
    texts.clear()
