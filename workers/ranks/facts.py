"""The facts that must be the same on all nodes, and the first in which two nodes differ."""

import json
import socket
from collections.abc import Mapping
from typing import Any

from oarlock.workers.errors import StartupError

# Group -> name -> value, as JSON knows values. The first group that differs is named, so causes stand before effects.
Facts = Mapping[str, Mapping[str, Any]]

_FIXES = {
    "number of": "Start every node with the same --nnodes.",
    "version of": "Install the same versions on every host.",
    "weights in": "Give every node the same model.",
}
_MAX_SHOWN = 128  # characters of a value


def first_difference(ours: Facts, our_name: str, theirs: Facts, their_name: str) -> StartupError | None:
    """The first value that differs, on both nodes; None where all are equal."""
    for group in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(group, {}), theirs.get(group, {})
        for name in [*one, *(name for name in other if name not in one)]:
            if (name in one, one.get(name)) != (name in other, other.get(name)):
                here, there = (_shown(held[name]) if name in held else "nothing" for held in (one, other))
                return StartupError(
                    f"The nodes differ in the {printable(f'{group} {name}')}: {here} on {our_name}, {there} on "
                    f"{their_name}.",
                    _FIXES.get(group, "Start every node with the same options."),
                )
    return None


def own_host() -> str:
    """This host's name for itself."""
    return printable(socket.gethostname())


def printable(text: str) -> str:
    """Text of another node, for one line of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:_MAX_SHOWN])


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value))
