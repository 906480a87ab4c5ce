"""An answer as a list of items that grow one after the other, and the events of a stream that show it.

One machine for the whole answer and for its stream. An item is a dictionary of the wire: text, thoughts or a call of a
tool. Each is begun, filled and ended before the next; an endpoint says what its items and events look like.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from oarlock.server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, ToolCallStart

Event = tuple[str, dict[str, Any]]  # type, and the other members


class Kind(Enum):
    """The kinds of items."""

    TEXT = auto()
    THOUGHTS = auto()
    CALL = auto()


class StreamedItems(ABC):
    """The items of one answer as it grows."""

    shows_nothing: ClassVar[bool]  # an answer of nothing has an empty text; else it has no item

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []  # ended, and the open one
        self._open: Kind | None = None  # the kind of the open item
        self._texts: list[str] = []  # of the open item
        self._blank = ""  # white space that is text only if text follows, or if nothing else comes

    @abstractmethod
    def _begun(self, kind: Kind, name: str) -> Iterator[Event]:
        """Append an item of this kind. `name`: of the tool that a call calls."""

    @abstractmethod
    def _grown(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """The open item gets more text."""

    @abstractmethod
    def _ended(self, text: str, status: str) -> Iterator[Event]:
        """Write its whole text into the open item."""

    def push(self, events: Iterable[MessageEvent], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add a piece of the answer. `logprobs`: of its tokens, where the answer is plain text."""
        for event in events:
            if isinstance(event, ContentDelta):
                if self._open is not Kind.TEXT and not event.text.strip() and not logprobs:
                    self._blank += event.text
                    continue
                yield from self._begin(Kind.TEXT)
                text, self._blank = self._blank + event.text, ""
                yield from self._grow(text, logprobs)
            elif isinstance(event, ReasoningDelta):
                yield from self._begin(Kind.THOUGHTS)
                yield from self._grow(event.text)
            elif isinstance(event, ToolCallStart):
                self._blank = ""
                yield from self._begin(Kind.CALL, event.name)
            else:
                yield from self._grow(event.text)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """End the open item with this status. An answer of white space alone is text."""
        if not self.items and (self._blank or self.shows_nothing):
            yield from self._begin(Kind.TEXT)
            if self._blank:
                yield from self._grow(self._blank)
        yield from self._end_open(status)

    @property
    def _index(self) -> int:
        """The place of the open item."""
        return len(self.items) - 1

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Event]:
        if self._open is kind and kind is not Kind.CALL:
            return
        yield from self._end_open("completed")
        self._open, self._texts = kind, []
        yield from self._begun(kind, name)

    def _grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        self._texts.append(text)
        yield from self._grown(text, logprobs)

    def _end_open(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._ended("".join(self._texts), status)
            self._open = None
