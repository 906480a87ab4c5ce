"""Our command line, filled flag by flag from the rows for another server's flags."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.server.cli.migrate.rows import Row, Table, choose, fill, insert, known_values
from oarlock.server.config.options import OptionError, nearest
from oarlock.server.config.settings import OPTIONS, make_settings

_VARIABLE = re.compile(r"\$(\w|\{\w+\})")
_DEFAULT = "this is the default."


@dataclass(slots=True)
class Translation:
    """Our command line. `notes` and `lost`: (their flag as it was written, one sentence)."""

    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    flags: dict[str, list[str]] = field(default_factory=dict)  # option -> its words; the last given ones count
    values: dict[str, Any] = field(default_factory=dict)  # option -> its value; the default for a variable of the shell
    notes: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)

    def set(self, written: str, flag: str, values: Sequence[str] = ()) -> bool:
        """Set our `flag`, a VARIABLE=value or MODEL. Returns whether it accepts these values; if not, they are lost."""
        name, equals, value = flag.partition("=")
        if equals:
            self.environment[name] = value
            return True
        described = OPTIONS[_option(flag)]
        is_switch, words, value = described.kind is bool, [flag, *values], described.default
        if not values and not is_switch:
            self.lost.append((written, f"it has no value, and {flag} needs one."))
            return False
        if described.positional:
            self.model = values[0]
            return True
        try:
            if is_switch:
                value = (described.from_text(values[0]) if values else True) == (flag == described.flag)
                words = [described.flag if value else f"--no-{described.flag[2:]}"]
            elif described.many:
                value = described.from_texts(values)
            elif not _VARIABLE.search(values[0]):
                value = described.from_text(values[0])
        except OptionError as error:
            hint = " Without the flag, it is detected." if described.choices[:1] == ("auto",) else ""
            self.lost.append((written, f"{error.cause} {error.fix}{hint}"))
            return False
        self.flags[described.name], self.values[described.name] = words, value
        return True

    def put(self, written: str, name: str, rows: Sequence[Row], values: Sequence[str]) -> None:
        """Translate the flag `name`, which is `written` with these values."""
        chosen = choose(rows, values)
        if chosen is None:
            self.lost.append((written, f"there is no such value. {known_values(rows)}"))
            return
        row, parts = chosen
        sentence = insert(row.note, parts)
        ours = row.ours.replace("the same", f"{name} {row.value}".rstrip(" ,…"))
        if values and not row.value:  # a switch with a value, such as a variable
            if _option(ours) in OPTIONS:
                self.set(written, ours, values)
                return
            if values[0].lower() in ("0", "false", "no", "off") and ours != "not needed":
                self.notes.append((written, _DEFAULT))
                return
        if row.ours in ("not needed", "no equivalent"):
            for other in rows:  # the last of several values counts
                self.flags.pop(_option(other.ours.replace("the same", name).partition(" ")[0]), None)
            (self.notes if row.ours == "not needed" else self.lost).append((written, sentence or _DEFAULT))
            return
        accepted = [self.set(written, flag, given) for flag, *given in fill(ours.removeprefix("partly "), parts)]
        if all(accepted) and sentence:
            (self.lost if ours.startswith("partly") else self.notes).append((written, sentence))

    def read_flags(self, words: list[str], table: Table) -> list[str]:
        """Translate the flags in `words`. Returns the words that follow no flag."""
        words, others = list(words), []
        while words:
            shown, equals, value = words.pop(0).partition("=")
            if not shown.startswith("-"):
                others.append(shown + equals + value)
                continue
            name = shown if shown in table else f"--{shown[2:].replace('_', '-')}"
            values = [value] if equals else _values(words, table.get(name))
            written = " ".join([shown, *values])
            if name in table:
                self.put(written, name, table[name], values)
            else:
                near = nearest(name, [described.flag for described in OPTIONS.values()])
                hint = f" A similar flag is {near}." if near else ""
                self.lost.append((written, f"there is no such flag.{hint}"))
        return others

    def drop_conflicting(self) -> None:
        """Drop options that `serve` refuses together with the others, each with its reason."""
        if "uds" in self.flags and self.flags.pop("port", None):
            self.notes.append(("--port", "a Unix socket has no port."))
        while True:
            try:
                make_settings({name: self.values[name] for name in self.flags})
                return
            except OptionError as error:
                named = [name for name in self.flags if re.search(rf"{OPTIONS[name].flag}\b", str(error))]
                dropped = self.flags.pop(named[0] if named else next(iter(self.flags)))
                self.lost.append((" ".join(dropped), str(error)))

    def command(self) -> str:
        """Return the line for a shell."""
        words = ["oarlock", "serve", *([self.model] if self.model else [])]
        words += [word for flag in self.flags.values() for word in flag]
        before = [f"{name}={_quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*before, *map(_quoted, words)])


def _option(flag: str) -> str:
    return re.sub("^--(no-)?", "", flag).replace("-", "_").lower()


def _values(words: list[str], rows: Sequence[Row] | None) -> list[str]:
    """Take the values of a flag from the front of `words`, which ends at the next flag. None: an unknown flag."""
    rows = rows if rows is not None else [Row("{x}…", "")]
    most = 1
    if any(row.value.endswith("}…") for row in rows):
        most = len(words)
    elif any(not row.value for row in rows):  # a switch, whose value is optional
        most = len([row for row in rows if row.value and words and row.parts(words[:1]) is not None][:1])
    found: list[str] = []
    while words and len(found) < most and not re.match(r"-{1,2}[A-Za-z]", words[0]):
        found.append(words.pop(0))
    return found


def _quoted(word: str) -> str:
    """Quote a word for a shell, which still substitutes variables and the home directory."""
    if word.startswith("~/"):
        return f"~/{shlex.quote(word[2:])}" if word[2:] else word
    if _VARIABLE.search(word) and not re.search(r'["`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)
