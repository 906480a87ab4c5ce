"""Messages between the server and the processes that render chat templates, and the limits of a rendering.

A request is the length of a JSON array and the array: first `[sources, names, cpu_limit_s, niceness]`, then `[]` to
compile all templates, or `[template, variables, max_characters]` to render one of them. A response is a kind, the
length of a text and the text in UTF-8.
"""

import json
import struct
from enum import IntEnum
from typing import Any

CPU_LIMIT_S = 2.0  # CPU time of one rendering: a busy machine does not make a template slow
MEMORY_LIMIT_BYTES = 128 << 20  # limit in addition to the memory of an idle process
MEMORY_PER_BYTE = 24  # additional for a large request: as Python objects, in pieces, as a text and as UTF-8
MAX_ERROR = 300  # limit in characters

LENGTH = struct.Struct("<I")
REPLY = struct.Struct("<BI")


class ReplyKind(IntEnum):
    """Kind of a response, which determines its text."""

    TEXT = 0  # the prompt; empty if templates were compiled
    REFUSED = 1  # the error that Jinja or the template itself raised
    FAILED = 2  # the name of any other exception
    TOO_LARGE = 3  # empty: the template exceeds the character limit
    OUT_OF_MEMORY = 4  # empty: MemoryError was raised
    KILLED = 5  # the number of the signal that ended the process


def request(*values: Any) -> bytes:
    """Return a packed request. Raises `RecursionError` for values that nest too deeply."""
    data = json.dumps(values, ensure_ascii=False).encode()
    return LENGTH.pack(len(data)) + data


def reply(kind: ReplyKind, text: str = "") -> bytes:
    """Return a packed response. Raises `UnicodeEncodeError` for a text with half a surrogate pair."""
    data = text.encode()
    return REPLY.pack(kind, len(data)) + data
