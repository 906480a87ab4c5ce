"""Translation of another server's command line: tables of its flags, and the reading of a line with them."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import OPTIONS, make_settings

_VARIABLE = re.compile(r"\$(\w|\{\w+\})")


@dataclass(slots=True)
class Translation:
    """Our command line, filled flag by flag. `notes` and `lost`: (their flag as it was written, one sentence)."""

    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)  # option -> its words; the last given ones count
    notes: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def set(self, written: str, name: str, values: Sequence[str]) -> bool:
        """Give our option `name` these values. Returns whether it accepts them; otherwise they are lost."""
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
            elif not any(map(_VARIABLE.search, values)):  # variables of the shell are not known here
                described.from_text(values[0])
            self.flags[name] = [described.flag, *(values if described.many else values[:1])]
        except OptionError as error:
            self.lost.append((written, f"{error.cause} {error.fix}"))
            return False
        return True

    def value(self, name: str) -> str | None:
        """Return the single value that an option was given."""
        words = self.flags.get(name)
        return words[1] if words else None

    def drop_what_does_not_go_together(self) -> None:
        """Drop options that `serve` refuses together with the others, each with its reason."""
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
        """Return the line for a shell."""
        words = ["oarlock", "serve", *([self.model] if self.model else [])]
        words += [word for flag in self.flags.values() for word in flag]
        before = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*before, *map(_quoted, words)])


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server that lines start: the translation of its flags, and its default address."""

    translate: Callable[[list[str], dict[str, str]], Translation]  # takes the words after its name, and the variables
    host: str
    port: int
    address_note: str
    port_in_image: int


def _quoted(word: str) -> str:
    """Quote a word for a shell, which still substitutes variables and the home directory."""
    if word.startswith("~/"):
        return f"~/{shlex.quote(word[2:])}" if word[2:] else word
    if _VARIABLE.search(word) and not re.search(r'["`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def values_after(words: list[str], most: int | None = None) -> list[str]:
    """Take the values of a flag from the front of `words`: up to the next flag, at most `most`."""
    found: list[str] = []
    while words and (most is None or len(found) < most) and not re.match(r"-{1,2}[A-Za-z]", words[0]):
        found.append(words.pop(0))
    return found


@dataclass(frozen=True, slots=True)
class Theirs:
    """A flag of another server. Without `option` it is noted with the sentence `holds`, or, if `is_lost`, reported as
    lost."""

    option: str = ""  # ours, or "model"
    holds: str = ""  # a sentence; with an option, on differences between the two
    is_switch: bool = False
    is_lost: bool = False
    many: bool = False  # takes every value up to the next flag
    is_list: bool = False  # its value has commas between its parts
    values: dict[str, str] = field(
        default_factory=dict
    )  # their value -> ours; "" drops the flag, others pass as they are


Table = Mapping[str, Theirs]


def same(
    option: str,
    *names: str,
    holds: str = "",
    switch: bool = False,
    is_list: bool = False,
    values: dict[str, str] | None = None,
) -> dict[str, Theirs]:
    """Describe flags that are our `option`, possibly with other values."""
    theirs = Theirs(option, holds, is_switch=switch, is_list=is_list, values=values or {})
    return dict.fromkeys(names, theirs)


def holds(sentence: str, *names: str, switch: bool = False) -> dict[str, Theirs]:
    """Describe flags that ask for our default, or that have no counterpart and change no completion."""
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch))


def lost(sentence: str, *names: str, switch: bool = False, many: bool = False) -> dict[str, Theirs]:
    """Describe flags that ask for something that Oarlock lacks."""
    return dict.fromkeys(names, Theirs(holds=sentence, is_switch=switch, is_lost=True, many=many))


def read_flags(found: Translation, words: list[str], table: Table) -> list[str]:
    """Translate `words`, which follow the program's name, into `found`. Returns the words that belong to no flag."""
    words, others = list(words), []
    while words:
        shown, equals, value = words.pop(0).partition("=")
        if not shown.startswith("-"):
            others.append(shown + equals + value)
            continue
        theirs = table.get(shown) or table.get(f"--{shown[2:].replace('_', '-')}" if shown[:2] == "--" else "")
        if theirs is None:
            given = [value] if equals else values_after(words)
            found.lost.append((" ".join([shown, *given]), "there is no such flag here."))
            continue
        many = theirs.many or (theirs.option in OPTIONS and OPTIONS[theirs.option].many)
        given = [value] if equals else [] if theirs.is_switch else values_after(words, None if many else 1)
        put(found, " ".join([shown, *given]), theirs, given)
    return others


def read_variables(found: Translation, variables: Mapping[str, str], table: Table, prefix: str) -> None:
    """Translate variables that are in `table`. Others with the server's `prefix` are lost, the rest stay the same."""
    for name, value in variables.items():
        if name in table:
            put(found, f"{name}={value}", table[name], [value])
        elif prefix and name.startswith(prefix):
            found.lost.append((f"{name}={value}", "this variable is not read; `oarlock config` lists ours."))
        else:
            found.environment[name] = value  # variables of CUDA, the hub and the system


def put(found: Translation, written: str, theirs: Theirs, given: list[str]) -> None:
    """Enter one flag with its values into `found`."""
    if not theirs.option:
        (found.lost if theirs.is_lost else found.notes).append((written, theirs.holds))
        return
    if theirs.option == "model":
        found.model = given[0] if given else found.model
        return
    if theirs.is_list:
        given = [part for text in given for part in text.split(",") if part]
    ours = [theirs.values.get(each, each) for each in given or ([""] if "" in theirs.values else [])]
    if ours == [""]:
        found.notes.append((written, theirs.holds or "this is what happens without a flag."))
    elif found.set(written, theirs.option, ours) and theirs.holds:
        found.notes.append((written, theirs.holds))
