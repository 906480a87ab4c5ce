"""What becomes of another server's command line: our flags, what holds without a flag, and what is lost."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.config.options import OptionError
from server.config.settings import OPTIONS

_THOUSANDS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


@dataclass(slots=True)
class Translation:
    """Filled flag by flag. `notes` and `lost`: (their flag as it was written, one sentence)."""

    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)  # option -> its words, of which the last given count
    notes: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def set(self, written: str, name: str, values: Sequence[str]) -> None:
        """Give our option `name` these values; what it does not take is lost."""
        described = OPTIONS[name]
        try:
            if described.kind is bool:
                value = described.from_text(values[0]) if values else True
                self.flags[name] = [described.flag if value else f"--no-{described.flag[2:]}"]
                return
            if not values:
                self.lost.append((written, f"it has no value, and {described.flag} needs one."))
                return
            read = [_whole(value) for value in values] if described.kind is int else list(values)
            if described.many:
                described.from_texts(read)
            else:
                described.from_text(read[0])
            self.flags[name] = [described.flag, *(read if described.many else read[:1])]
        except OptionError as error:
            self.lost.append((written, f"{error.cause} {error.fix}"))

    def command(self) -> str:
        """The line for a shell."""
        words = ["oarlock", "serve", *([self.model] if self.model else [])]
        words += [word for flag in self.flags.values() for word in flag]
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*before, shlex.join(words)])


def _whole(text: str) -> str:
    """`32k` and `32K` as vLLM means them; anything else as it is."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    return text if match is None else str(int(float(match[1]) * _THOUSANDS[match[2]]))


def values_after(words: list[str], most: int | None = None) -> list[str]:
    """Take the values of a flag from the front of `words`: up to the next flag, `most` of them at most."""
    found: list[str] = []
    while words and (most is None or len(found) < most) and not re.match(r"-{1,2}[A-Za-z]", words[0]):
        found.append(words.pop(0))
    return found
