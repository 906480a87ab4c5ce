"""Estimates of the time and memory needed to parse and check a JSON body, from counts of its bytes.

The counts bound the number of values: each object has a brace, each member a colon, each further value a comma. Strings
may contain these characters too, so a body that seems expensive is counted again without its strings.
"""

import re
from dataclasses import dataclass
from itertools import islice

AT_ONCE_MS = 8.0  # time that the event loop may spend on one body
# Measured with conversations of thousands of empty messages, lists of numbers, and objects with many members.
_MS_PER_BYTE = 8e-6
_MS_PER_OBJECT = 7e-3
_MS_PER_MEMBER = 1.5e-3
_MS_PER_VALUE = 2e-4
_BYTES_PER_OBJECT = 900  # a checked message or part of a message
_BYTES_PER_MEMBER = 80
BYTES_PER_VALUE = 40
_BYTES_PER_LIST = 64
_LONG = 2**20  # bytes; a single wide character in a string of this length makes all its characters wide
_MAX_CHARACTER_BYTES = 4  # bytes of the widest character
# The repetitions are possessive (no backtracking), so the time is linear.
_TOKEN = re.compile(rb'"(?:[^"\\]*+(?:\\.[^"\\]*+)*+)"|[{}\[\],]', re.DOTALL)
_MOST_TOKENS = 2**18  # that are looked at to find the largest member
_MAX_NAME = 64  # characters of a member that is named in an error
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class BodyCost:
    """Estimated cost of one body."""

    milliseconds: float  # CPU time until the body is a checked request
    num_bytes: int  # size of the parsed objects, in addition to the body's own bytes

    @property
    def takes_long(self) -> bool:
        """Whether reading the body would block the event loop."""
        return self.milliseconds > AT_ONCE_MS


def cost_of(body: bytes | bytearray) -> BodyCost:
    """Return the estimate for `body`. Counts the bytes once, and a second time if the body seems expensive."""
    cost = _counted(body, body)
    if cost.takes_long and len(body) * _MS_PER_BYTE <= AT_ONCE_MS:
        return _counted(body, _TEXT.sub(b"", body))
    return cost


def exact_cost_of(body: bytes) -> BodyCost:
    """Return the estimate for `body` without its strings, however long they are."""
    return _counted(body, _TEXT.sub(b"", body))


def largest_member(body: bytes) -> str | None:
    """Return the name of the member of the outer object that has most values, or None if it has no short name.

    Only the first `_MOST_TOKENS` texts, brackets and commas are counted.
    """
    depth, name, num_values, last = 0, b"", 0, b""
    largest = 0, b""
    for token in islice(_TOKEN.finditer(body), _MOST_TOKENS):
        text = token.group()
        if text in b"{[":
            if depth == 1:
                name, num_values = last, 0
            depth += 1
        elif text in b"}]":
            depth -= 1
            largest = max(largest, (num_values, name))
        elif depth == 1:
            last = text
        num_values += depth > 1
    found = max(largest, (num_values, name))[1].strip(b'"').decode("ascii", "replace")
    return found if 0 < len(found) <= _MAX_NAME and found.isidentifier() else None


def takes_long(body: bytes | bytearray) -> bool:
    """Return whether reading `body` would block the event loop."""
    return cost_of(body).takes_long


def _counted(body: bytes | bytearray, structure: bytes | bytearray) -> BodyCost:
    """Return the estimate. `structure`: the body, with or without its strings."""
    objects, members, lists, values = map(structure.count, (b"{", b":", b"[", b","))
    milliseconds = (
        len(body) * _MS_PER_BYTE
        + objects * _MS_PER_OBJECT
        + members * _MS_PER_MEMBER
        + (lists + values) * _MS_PER_VALUE
    )
    num_bytes = (
        objects * _BYTES_PER_OBJECT + members * _BYTES_PER_MEMBER + lists * _BYTES_PER_LIST + values * BYTES_PER_VALUE
    )
    if len(body) > _LONG and not body.isascii():
        num_bytes += (_MAX_CHARACTER_BYTES - 1) * len(body)
    return BodyCost(milliseconds, num_bytes)
