"""JSON as text on one line, whatever a client takes for a line end."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any

# Valid in JSON strings, yet taken for line ends by some clients that split events by lines.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\u2028\u2029\x85"}


def dumps(value: Any) -> str:
    """Any value, without white space. Raises `ValueError` for NaN and infinities."""
    return _on_one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def json_text(text: str) -> str:
    """Write `text` as a JSON string."""
    return _on_one_line(encode_basestring(text))


def _on_one_line(written: str) -> str:
    if not written.isascii():
        for end, escape in _LINE_ENDS.items():
            written = written.replace(end, escape)
    return written
