"""Messages between the server and the processes that render chat templates, and the limits of a rendering.

A request is the length of a JSON array and the array: first `[sources, names, cpu_limit_s, niceness]`, then `[]` to
compile all templates, or `[template, variables, max_characters]` to render one. An answer is a kind, the length of a
text and the text in UTF-8.
"""

import json
import struct
from enum import IntEnum
from typing import Any

CPU_LIMIT_S = 2.0  # of the processor's time, for one rendering: a busy machine does not make a template slow
MEMORY_LIMIT_BYTES = 128 << 20  # beyond what the process takes when it is idle
MEMORY_PER_BYTE = 24  # more for a large request: as Python's objects, in pieces, as a text and as UTF-8
MAX_ERROR = 300  # characters

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BI")


class Kind(IntEnum):
    """Kind of an answer, which says what its text is."""

    TEXT = 0  # the prompt; empty where templates were compiled
    REFUSED = 1  # the error that Jinja or the template itself raised
    FAILED = 2  # the name of any other exception
    TOO_LARGE = 3  # empty: the template writes more than it may
    OUT_OF_MEMORY = 4  # empty: MemoryError was raised
    KILLED = 5  # the number of the signal that ended the process


def request(*values: Any) -> bytes:
    """Pack a request. Raises `RecursionError` for values that nest too deeply."""
    data = json.dumps(values, ensure_ascii=False).encode()
    return LENGTH.pack(len(data)) + data


def answer(kind: Kind, text: str = "") -> bytes:
    """Pack an answer. Raises `UnicodeEncodeError` for a text with half a surrogate pair."""
    data = text.encode()
    return ANSWER.pack(kind, len(data)) + data
