"""Collects what another server's command line becomes: our flags, what holds without a flag, and what is lost."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS, make_settings

_VARIABLE = re.compile(r"\$(\w|\{\w+\})")


@dataclass(slots=True)
class Translation:
    """Holds our line, filled flag by flag. `notes` and `lost`: (their flag as it was written, one sentence)."""

    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)  # option -> its words, of which the last given count
    notes: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def set(self, written: str, name: str, values: Sequence[str]) -> bool:
        """Give our option `name` these values, and say whether it takes them: otherwise they are lost."""
        described = OPTIONS[name]
        try:
            if described.kind is bool:
                value = described.from_text(values[0]) if values else True
                self.flags[name] = [described.flag if value else f"--no-{described.flag[2:]}"]
                return True
            if not values:
                self.lost.append((written, f"it has no value, and {described.flag} needs one."))
                return False
            if described.many:
                described.from_texts(values)
            elif not any(map(_VARIABLE.search, values)):  # what a shell puts in is not known here
                described.from_text(values[0])
            self.flags[name] = [described.flag, *(values if described.many else values[:1])]
        except OptionError as error:
            self.lost.append((written, f"{error.cause} {error.fix}"))
            return False
        return True

    def value(self, name: str) -> str | None:
        """Find the one value that an option was given."""
        words = self.flags.get(name)
        return words[1] if words else None

    def drop_what_does_not_go_together(self) -> None:
        """Give up options that `serve` refuses beside the others, each with its reason."""
        while (refused := self._refused()) is not None:
            cause = f"{refused.cause} {refused.fix}"
            named = [name for name in self.flags if re.search(rf"{OPTIONS[name].flag}\b", cause)]
            name = named[0] if named else next(iter(self.flags))
            self.lost.append((" ".join(self.flags.pop(name)), cause))

    def _refused(self) -> OptionError | None:
        try:
            make_settings({name: self._typed(name, words) for name, words in self.flags.items()})
        except OptionError as error:
            return error
        return None

    def _typed(self, name: str, words: list[str]) -> Any:
        described = OPTIONS[name]
        if described.kind is bool:
            return not words[0].startswith("--no-")
        if described.many:
            return described.from_texts(words[1:])
        return described.default if _VARIABLE.search(words[1]) else described.from_text(words[1])

    def command(self) -> str:
        """Write the line for a shell."""
        words = ["oarlock", "serve", *([self.model] if self.model else [])]
        words += [word for flag in self.flags.values() for word in flag]
        before = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*before, *map(_quoted, words)])


@dataclass(frozen=True, slots=True)
class KnownServer:
    """Describes a server that lines start: how its flags are translated, and where it listens unless they say so."""

    translate: Callable[[list[str], dict[str, str]], Translation]  # takes what follows its name, and the variables
    host: str
    port: int
    address_note: str
    port_in_image: int


def _quoted(word: str) -> str:
    """Quote a word for a shell, which goes on putting in variables and the home directory."""
    if word.startswith("~/"):
        return f"~/{shlex.quote(word[2:])}" if word[2:] else word
    if _VARIABLE.search(word) and not re.search(r'["`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def values_after(words: list[str], most: int | None = None) -> list[str]:
    """Take the values of a flag from the front of `words`: up to the next flag, `most` of them at most."""
    found: list[str] = []
    while words and (most is None or len(found) < most) and not re.match(r"-{1,2}[A-Za-z]", words[0]):
        found.append(words.pop(0))
    return found
