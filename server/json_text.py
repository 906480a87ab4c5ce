"""JSON as text on a single line, even for clients that split at unusual line ends; long responses in pieces.

A piece takes about a millisecond, so that the event loop can run between two pieces.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from json.encoder import encode_basestring
from typing import Any

# These characters are valid in JSON strings, but some clients that split events by lines treat them as line ends.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\u2028\u2029\x85"}


def dumps(value: Any) -> str:
    """Return `value` as JSON without white space. Raises `ValueError` for NaN and infinities."""
    return _on_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def json_text(text: str) -> str:
    """Return `text` as a JSON string."""
    written = encode_basestring(text)
    return written if written.isascii() else _on_one_line(written)


def _on_one_line(written: str) -> str:
    if not written.isascii():
        for end, escape in _LINE_ENDS.items():
            written = written.replace(end, escape)
    return written


PIECE_NUMBERS = 1000  # logprobs in one piece, each about a microsecond
LONG_TEXT = 1 << 16  # characters of text that take about as long as one piece
_PIECE_CHARACTERS = 1 << 12


def numbers(items: Iterable[int]) -> "StreamedList":
    """Return a long list of integers that is written in pieces."""
    return StreamedList(lambda number: number, items, lambda number: 1)


class StreamedList:
    """A list that is built while it is written, from `make(item)`. `size(item)`: the item's work, in logprobs."""

    def __init__(self, make: Callable[[Any], Any], items: Iterable[Any], size: Callable[[Any], int]) -> None:
        self._make = make
        self._items = items
        self._size = size

    def __iter__(self) -> Iterator[str]:
        batch: list[Any] = []
        work = 0
        opening = "["
        for item in self._items:
            batch.append(self._make(item))
            work += self._size(item)
            if work >= PIECE_NUMBERS:
                yield opening + dumps(batch)[1:-1]
                batch, work, opening = [], 0, ","
        yield (opening + dumps(batch)[1:-1] if batch else opening.strip(",")) + "]"


def pieces_of(value: Any) -> Iterator[str]:
    """Yield the JSON of `value` in pieces. Its objects and lists of objects may contain `StreamedList`.

    Only the last piece may be tiny.
    """
    gathered: list[str] = []
    size = 0
    for text in _texts_of(value):
        gathered.append(text)
        size += len(text)
        if size >= _PIECE_CHARACTERS:
            yield "".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield "".join(gathered)


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, StreamedList):
        yield from value
    elif isinstance(value, dict) and value:
        opening = "{"
        for name, member in value.items():
            yield f"{opening}{dumps(name)}:"
            yield from _texts_of(member)
            opening = ","
        yield "}"
    elif isinstance(value, str) and len(value) > LONG_TEXT:
        yield '"'
        for start in range(0, len(value), LONG_TEXT):
            yield json_text(value[start : start + LONG_TEXT])[1:-1]
        yield '"'
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        opening = "["
        for item in value:
            yield opening
            yield from _texts_of(item)
            opening = ","
        yield "]"
    else:
        yield dumps(value)
