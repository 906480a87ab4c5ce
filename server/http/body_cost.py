"""Estimates of the time and memory that parsing and checking a JSON body takes, from counts of its bytes.

The counts bound the number of values: each object has a brace, each member a colon, each further value a comma. Texts
may hold these characters as well, so a body that seems expensive is counted again without its texts.
"""

import re
from dataclasses import dataclass

AT_ONCE_MS = 8.0  # what the event loop may spend on one body
# Measured with conversations of thousands of empty messages, lists of numbers and objects of many members.
_MS_PER_BYTE = 8e-6
_MS_PER_OBJECT = 7e-3
_MS_PER_MEMBER = 1.5e-3
_MS_PER_VALUE = 2e-4
_BYTES_PER_OBJECT = 900  # a checked message or part
_BYTES_PER_MEMBER = 80
BYTES_PER_VALUE = 40
_BYTES_PER_LIST = 64
_LONG = 2**20  # bytes: one wide character in a text of this length makes all its characters wide
_WIDEST = 4  # bytes of a character
# The repetitions are possessive: they never give back, so the time is linear.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class BodyCost:
    """An estimate for one body."""

    milliseconds: float  # of processor time, until it is a checked request
    num_bytes: int  # of the objects that it becomes, in addition to its own bytes

    @property
    def takes_long(self) -> bool:
        """Whether reading the body would block the event loop."""
        return self.milliseconds > AT_ONCE_MS


def cost_of(body: bytes | bytearray) -> BodyCost:
    """Return the estimate for `body`. Takes about a nanosecond for each byte, and ten if the body seems expensive."""
    cost = _counted(body, body)
    if cost.takes_long and len(body) * _MS_PER_BYTE <= AT_ONCE_MS:
        return _counted(body, _TEXT.sub(b"", body))
    return cost


def exact_cost_of(body: bytes) -> BodyCost:
    """Return the estimate for `body` without its texts, however long they are."""
    return _counted(body, _TEXT.sub(b"", body))


def takes_long(body: bytes | bytearray) -> bool:
    """Whether reading it would block the event loop."""
    return cost_of(body).takes_long


def _counted(body: bytes | bytearray, structure: bytes | bytearray) -> BodyCost:
    """`structure`: the body, with or without its texts."""
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
        num_bytes += (_WIDEST - 1) * len(body)
    return BodyCost(milliseconds, num_bytes)
