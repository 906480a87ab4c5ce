"""A response as a list of items that grow one after another, and the events of a stream that show it.

`StreamedItems` holds the items. `ItemsWriter` writes the whole response or its stream, for both responses and messages.
An item is a dictionary in wire format: text, reasoning or a tool call. Each item is begun, filled and ended before the
next. The endpoint defines its items, its events and the object around them.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta, MessageEvent, ReasoningDelta, ToolCallStart
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import Delta

Event = tuple[str, dict[str, Any]]  # type, and the other members


class ItemKind(Enum):
    """The kinds of items."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class StreamedItems(ABC):
    """The items of one response as it grows."""

    shows_nothing: ClassVar[bool]  # True: an empty response has an item with empty text; False: it has no item

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []  # all ended items and the open item
        self._open: ItemKind | None = None  # kind of the open item; None: no item is open
        self._texts: list[str] = []  # pieces of the open item's text
        self._call_id = ""  # id of the open call, if the model's format has ids
        self._blank = ""  # white space that is text only if text follows, or if the response has nothing else

    @abstractmethod
    def _begun(self, kind: ItemKind, name: str) -> Iterator[Event]:
        """Append an item of this kind. `name`: the called tool, for a call."""

    @abstractmethod
    def _grown(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Add text to the open item."""

    @abstractmethod
    def _ended(self, text: str, status: str) -> Iterator[Event]:
        """Write the whole text into the open item."""

    def push(self, events: Iterable[MessageEvent], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Add a piece of the response. `logprobs`: log-probabilities of its tokens, if the response is plain text."""
        for event in events:
            if isinstance(event, ContentDelta):
                if self._open is not ItemKind.TEXT and not event.text.strip() and not logprobs:
                    self._blank += event.text
                    continue
                yield from self._begin(ItemKind.TEXT)
                text, self._blank = self._blank + event.text, ""
                yield from self._grow(text, logprobs)
                logprobs = ()
            elif isinstance(event, ReasoningDelta):
                yield from self._begin(ItemKind.REASONING)
                yield from self._grow(event.text)
            elif isinstance(event, ToolCallStart):
                self._blank = ""
                self._call_id = event.id
                yield from self._begin(ItemKind.CALL, event.name)
            else:
                yield from self._grow(event.text)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """End the open item with this status. A response of only white space is text."""
        if not self.items and (self._blank or self.shows_nothing):
            yield from self._begin(ItemKind.TEXT)
            if self._blank:
                yield from self._grow(self._blank)
        yield from self._end_open(status)

    @property
    def _index(self) -> int:
        """Index of the open item."""
        return len(self.items) - 1

    def _begin(self, kind: ItemKind, name: str = "") -> Iterator[Event]:
        if self._open is kind and kind is not ItemKind.CALL:
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


class ItemsWriter(GenerationWriter):
    """Writer of a response made of items, whole or as events."""

    def __init__(self, generation: Generation, shape: MessageShape, items: StreamedItems) -> None:
        self._generation = generation
        self._parser = MessageParser(shape, in_items=True)
        self._items = items
        self._last: Delta | None = None  # the piece that ended the response

    @abstractmethod
    def _ended(self) -> dict[str, Any]:
        """Return the whole response, after its items have ended."""

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        return f"event: {kind}\ndata: {dumps({'type': kind, **members})}\n\n".encode()

    def _push(self, delta: Delta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        self._last = delta if delta.finish_reason is not None else self._last
        return self._items.push(self._parser.push(delta), logprobs)

    def _end_items(self) -> Iterator[Event]:
        return self._items.end()

    def chunk(self, delta: Delta) -> bytes | None:
        return b"".join(self._event(*event) for event in self._push(delta)) or None

    def whole(self, deltas: Sequence[Sequence[Delta]], generation: Generation) -> Iterator[str]:
        for delta in deltas[0]:
            deque(self._push(delta), 0)
        deque(self._end_items(), 0)
        return iter((dumps(self._ended()),))
