"""Takes long texts and lists of token ids out of a checked body, and puts them back.

Parsing JSON holds the GIL. So another process parses a large body and returns it in a small form, with its long texts
and ids as plain bytes, which become Python objects many times faster than JSON does.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oarlock.server.strict_model import StrictModel

# Fields that may hold them.
_TEXTS = frozenset({"prompt", "suffix", "content", "text", "refusal", "reasoning", "reasoning_content", "arguments"})
_TEXTS |= {"input", "instructions", "output", "encrypted_content", "query", "documents", "text_1", "text_2"}
_IDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids", "stop_token_ids"})
_MIN_CHARACTERS = 128
_MIN_IDS = 32
_DECODED_AT_ONCE = 2**20  # bytes

Path = list[str | int]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One long value: its place in the body, and its bytes (UTF-8, or int32 in the machine's byte order)."""

    path: Path
    kind: str  # "text" or "ids"
    data: bytes

    def described(self) -> tuple[Path, str, int]:
        """All but the bytes: path, kind, and their number."""
        return self.path, self.kind, len(self.data)


def detach(value: dict[str, Any], parsed: StrictModel) -> list[Leaf]:
    """Take the long values out of the JSON of a checked body; a short one of the same kind replaces each."""
    return list(_of_fields(value, parsed, []))


def _of_fields(value: dict[str, Any], parsed: StrictModel, path: Path) -> Iterator[Leaf]:
    for name in value.keys() & type(parsed).model_fields.keys():  # what is not declared stays where it is
        yield from _detached(value, name, getattr(parsed, name), [*path, name], name)


def _detached(container: Any, key: str | int, parsed: Any, path: Path, field: str) -> Iterator[Leaf]:
    """Take the long values out of `container[key]`, which became `parsed`."""
    value = container[key]
    if isinstance(parsed, str):
        if field in _TEXTS and len(parsed) >= _MIN_CHARACTERS:
            container[key] = "x"
            yield Leaf(path, "text", parsed.encode())
    elif isinstance(parsed, list) and len(parsed) >= _MIN_IDS and isinstance(parsed[0], int):
        if field in _IDS:
            container[key] = parsed[:1]
            yield Leaf(path, "ids", array("i", parsed).tobytes())
    elif isinstance(parsed, list):
        for index, item in enumerate(parsed):
            yield from _detached(value, index, item, [*path, index], field)
    elif isinstance(parsed, StrictModel):
        yield from _of_fields(value, parsed, path)


def attach(parsed: Any, path: Path, value: str | list[int]) -> None:
    """Put one back where it was."""
    for key in path[:-1]:
        parsed = parsed[key] if isinstance(key, int) else getattr(parsed, key)
    if isinstance(path[-1], int):
        parsed[path[-1]] = value
    else:
        setattr(parsed, path[-1], value)


def value_of(kind: str, data: memoryview) -> str | list[int]:
    """The value of a `Leaf`, made without holding the GIL for long."""
    if kind == "text":
        decode = codecs.getincrementaldecoder("utf-8")().decode
        return "".join(
            decode(data[start : start + _DECODED_AT_ONCE]) for start in range(0, len(data), _DECODED_AT_ONCE)
        )
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()
