"""What head and node say to each other on a fresh link, before anything else: JSON in messages of reserved kinds.

    node -> head    HELLO     who it is, and its facts
    head -> node    WAITING   it may stay; once a second, until all are there
    head -> node    REFUSED   cause and fix
    head -> node    GO        all nodes are there; the link is the executor's now

Facts are what must be the same on all nodes, in groups by what to do when it is not.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from workers.distributed.nodes.link import FIRST_RESERVED_KIND
from workers.errors import StartupError

HELLO: Final = FIRST_RESERVED_KIND
WAITING: Final = FIRST_RESERVED_KIND + 1
REFUSED: Final = FIRST_RESERVED_KIND + 2
GO: Final = FIRST_RESERVED_KIND + 3
MAX_HELLO_BYTES: Final = 256 << 10

# Group -> name -> value, as JSON knows values. The first group that differs is named, so causes stand before effects.
Facts = Mapping[str, Mapping[str, Any]]

_FIXES = {
    "version of": "Install the same versions on every host.",
    "setting": "Start every node with the same options.",
    "weights in": "Give every node the same model.",
}


class NotAGreetingError(Exception):
    """The bytes of a message are not what they must be here."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself."""

    node: int
    nnodes: int
    host: str
    start: str  # random: a node that lost its connection is told from a second one with its number
    facts: Facts

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> "Hello":
        """Raises `NotAGreetingError`."""
        fields = _object(data)
        node, nnodes, facts = fields.get("node"), fields.get("nnodes"), fields.get("facts")
        host, start = fields.get("host"), fields.get("start")
        if type(node) is not int or type(nnodes) is not int or not isinstance(host, str) or not isinstance(start, str):
            raise NotAGreetingError("a node number, a number of nodes, a host or a start is missing")
        if not isinstance(facts, dict) or not all(isinstance(group, dict) for group in facts.values()):
            raise NotAGreetingError("facts are missing")
        return Hello(node, nnodes, printable(host), start, facts)


def refusal(error: StartupError) -> bytes:
    return json.dumps({"cause": error.cause, "fix": error.fix, "exit_code": error.exit_code}).encode()


def read_refusal(data: bytes) -> StartupError:
    """Raises `NotAGreetingError`."""
    fields = _object(data)
    cause, fix, exit_code = fields.get("cause"), fields.get("fix"), fields.get("exit_code")
    if not isinstance(cause, str) or not isinstance(fix, str) or type(exit_code) is not int:
        raise NotAGreetingError("a cause, a fix or an exit code is missing")
    return StartupError(cause, fix, exit_code)


def first_difference(ours: Facts, our_name: str, theirs: Facts, their_name: str) -> StartupError | None:
    """What differs first, with both values and where each holds; None where nothing does."""
    for group in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(group, {}), theirs.get(group, {})
        for name in [*one, *(name for name in other if name not in one)]:
            if (name in one, one.get(name)) != (name in other, other.get(name)):
                what = printable(f"{group} {name}")
                here, there = (_shown(held[name]) if name in held else "nothing" for held in (one, other))
                return StartupError(
                    f"The nodes differ in the {what}: {here} on {our_name}, {there} on {their_name}.",
                    _FIXES.get(group, "Start every node with the same options."),
                )
    return None


def own_host() -> str:
    """This host's name for itself."""
    return printable(socket.gethostname())


def printable(text: str) -> str:
    """Text of another node, for one line of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:128])


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value))


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotAGreetingError("it is not JSON") from error
    if not isinstance(fields, dict):
        raise NotAGreetingError("it is not an object")
    return fields
