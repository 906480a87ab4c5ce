"""Description of one option, its parsing from text and its checks: type, range, choices and names.

An option is a dataclass field with metadata. Flags, environment names, TOML keys and the table in the documentation are
made from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class OptionError(ValueError):
    """A wrong value or name of an option. `cause` and `fix` are one line each."""

    def __init__(self, cause: str, fix: str) -> None:
        super().__init__(f"{cause} {fix}")
        self.cause = cause
        self.fix = fix


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COUNTS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COMMA_OUTSIDE = r",(?![^{}]*\})"  # a comma that is not in a JSON object
_JSON_NAMES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Option:
    """One described option, joined with its name and type."""

    name: str  # the TOML key and the attribute of Settings
    kind: type  # str, int, float or bool
    many: bool  # the value is a tuple of `kind`
    optional: bool  # None is a value: decided automatically, or without a limit
    default: Any
    help: str
    example: str
    group: str
    limits: tuple[float, float] | None = None  # the smallest and the largest value
    choices: tuple[str, ...] = ()
    short: str | None = None
    is_bytes: bool = False  # accepts 512MiB, 2GiB, 4096
    is_count: bool = False  # accepts 16k, 16K, 16384
    aliases: Mapping[str, Any] = field(default_factory=dict)  # other words for a value, as other servers name it
    unset: str = ""  # the default's name in the documentation, if `unset_text` would be wrong
    special: tuple[int, ...] = ()  # values outside of the range that have a meaning of their own
    is_json: bool = False  # text that is a JSON object, or a table of TOML
    has_objects: bool = False  # a list of texts, each of which may be a JSON object, or a table of TOML
    is_path: bool = False  # a file, a directory, or a name that is a path if it begins with ~
    secret: bool = False  # never printed
    positional: bool = False

    @property
    def flag(self) -> str:
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "OARLOCK_" + self.name.upper()

    @property
    def type_name(self) -> str:
        if self.choices:
            return "|".join(self.choices)
        return f"array of {self.item_type_name}" if self.many else self.item_type_name

    @property
    def item_type_name(self) -> str:
        """The type of one value by its name in JSON. A number of bytes, which may have a unit, is a `size`."""
        return "size" if self.is_bytes else "object" if self.is_json else _JSON_NAMES[self.kind]

    @property
    def unset_text(self) -> str:
        """Name of a value that is not given: "automatic" if the server decides, "none" if there is no value."""
        is_decided = self.optional and (self.positional or self.kind is not str)
        return self.unset or ("automatic" if is_decided else "none")

    @property
    def default_text(self) -> str:
        if self.default is None or self.default == ():
            return self.unset_text
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def values_text(self) -> str:
        """The allowed values: the choices, or the range of a number. Empty if any value is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind is bool:
            return f"--no-{self.flag[2:]} turns it off" if self.default else ""
        if self.limits is None:
            return ""
        low, high = (_limit(limit, is_bytes=self.is_bytes) for limit in self.limits)
        others = "".join(f", or {number}" for number in self.special)
        return f"{low} to {high}{others}"

    def from_text(self, text: str) -> Any:
        """Return the value of a flag or an environment variable. Lists are split at commas."""
        if self.many:
            commas = _COMMA_OUTSIDE if self.has_objects else ","
            parts = [part.strip() for part in re.split(commas, text) if part.strip()]
            return self.from_texts(parts)
        return self.check(self._scalar(self._not_blank([text.strip()])[0]))

    def from_texts(self, texts: Iterable[str]) -> Any:
        """Return the values of a flag that takes several."""
        return self.check(tuple(self._scalar(text) for text in self._not_blank(list(texts))))

    def from_toml(self, value: Any) -> Any:
        """Return the value of a TOML key, which has a type already. The type is checked."""
        if self.many:
            items = value if isinstance(value, list) else [value]
            if self.has_objects:
                items = [json.dumps(item) if isinstance(item, dict) else item for item in items]
            if not all(isinstance(item, self.kind) for item in items):
                raise self._wrong(value, f"of type {self.type_name}")
            return self.check(tuple(self._not_blank(items)))
        if (self.is_bytes or self.is_count) and isinstance(value, str):
            return self.check(self._scalar(value))
        if self.is_json and isinstance(value, dict):
            return json.dumps(value)
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not self.kind:
            raise self._wrong(value, f"of type {self.type_name}")
        return self.check(value)

    def check(self, value: Any) -> Any:
        """Return `value`, or the value that it is an alias of. Raises an `OptionError` that names the limit."""
        if isinstance(value, str):
            value = self.aliases.get(value, value)
        if value is None or (not self.many and value in self.special):
            if value is None and not self.optional:
                raise self._wrong(value, "set")
            return value
        for item in value if self.many else (value,):
            if self.choices and item not in self.choices:
                near = difflib.get_close_matches(str(item), self.choices, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise self._wrong(item, f"one of {', '.join(self.choices)}{hint}")
            if self.kind is float and not math.isfinite(item):
                raise self._wrong(item, "a finite number")
            if self.limits is not None and item < self.limits[0]:
                raise self._wrong(item, f"at least {_number(self.limits[0])}")
            if self.limits is not None and item > self.limits[1]:
                raise self._wrong(item, f"at most {_number(self.limits[1])}")
            if self.kind is str and not item:
                raise self._wrong(item, "not empty")
        return self._expanded(value) if self.is_path else value

    def _expanded(self, path: str) -> str:
        try:
            return os.fspath(expand(path)) if path.startswith("~") else path  # ./~NAME stays as it is
        except StartupError as error:
            raise OptionError(f"{self.flag}: {error.cause}", error.fix) from None

    def _not_blank(self, values: list[Any]) -> list[Any]:
        """Refuse a blank secret: it would leave the server open although the operator believes that it is protected."""
        if self.secret and not (values and all(value.strip() for value in values)):
            raise OptionError(
                f"{self.env}, {self.flag} or {self.name} is given, but contains no key.",
                f"Give it a key, for example {self.usage}, or unset it.",
            )
        return values

    def _scalar(self, text: str) -> Any:
        if text.lower() in self.aliases:
            return self.aliases[text.lower()]
        if self.optional and text.lower() in ("auto", "none") and not self.choices:
            return None
        try:
            if self.is_bytes:
                return parse_size(text)
            if self.is_count:
                return parse_count(text)
            if self.kind is bool:
                return _parse_bool(text)
            return self.kind(text)
        except ValueError:
            wanted = "an integer, such as 16000, 16k for the same or 16K for 16384"
            raise self._wrong(text, wanted if self.is_count else f"of type {self.type_name}") from None

    def _wrong(self, value: Any, wanted: str) -> OptionError:
        shown = "…" if self.secret else repr(value)[:80]
        return OptionError(f"{self.flag} is {shown}, but it must be {wanted}.", f"For example: {self.usage}")

    @property
    def usage(self) -> str:
        if self.positional:
            return self.example
        if self.kind is bool:
            return f"{self.flag} or --no-{self.flag[2:]}"
        return f"{self.flag} '{self.example}'" if self.is_json else f"{self.flag} {self.example}"


def option(default: Any, *, help: str, example: str = "", **metadata: Any) -> Any:
    """Return a dataclass field with the metadata of an `Option`."""
    return dataclasses.field(default=default, metadata=dict(help=help, example=example, **metadata))


def _number(value: float) -> str:
    """Return a number as a person would write it: 16,777,216, not 1.67772e+07."""
    return f"{value:,.0f}" if value >= 1e5 else f"{value:g}"


def _limit(value: float, *, is_bytes: bool) -> str:
    """Return a limit of a range as text: 16 MiB for a number of bytes."""
    return format_size(int(value)).replace(".0 ", " ") if is_bytes else _number(value)


def describe(cls: type[DataclassInstance]) -> dict[str, Option]:
    """Return every option of a dataclass, by name, in the order of declaration. Each of its bases is a `GROUP`."""
    hints = typing.get_type_hints(cls)
    groups = {name: vars(base)["GROUP"] for base in cls.__bases__ for name in base.__annotations__}
    described = {}
    for item in dataclasses.fields(cls):
        kind, many, optional = _unwrap(hints[item.name])
        group = groups[item.name]
        described[item.name] = Option(item.name, kind, many, optional, item.default, group=group, **item.metadata)
    return described


def _unwrap(hint: Any) -> tuple[type, bool, bool]:
    """Return (scalar type, is a tuple, may be None) of an annotation such as `int | None` or `tuple[str, ...]`."""
    optional = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        optional = len(args) < len(typing.get_args(hint))
        hint = args[0]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True, optional
    return hint, False, optional


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be, or None."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return found[0] if found else None


def parse_size(text: str) -> int:
    """Return the bytes in `2GiB`, `512MiB`, `1.5GB` or `4096`. K, M, G and T without B are binary."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_count(text: str) -> int:
    """Return a number written as in vLLM: `16k` is 16,000, `16K` 16,384 and `1.5k` 1,500. `1.5K` is refused."""
    match = re.fullmatch(r"(\d+)(\.\d+)?([kmgtKMGT])", text.strip())
    if match is None:
        return int(text)
    whole, fraction, unit = match.groups()
    if fraction is None:
        return int(whole) * _COUNTS[unit]
    if unit.isupper():
        raise ValueError(text)
    return int(float(whole + fraction) * _COUNTS[unit])


def format_size(size: int) -> str:
    """Format a number of bytes: `2147483648` as `2.0 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)
