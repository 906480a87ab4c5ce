"""Patterns of an adapter's settings that choose modules by name, as PEFT reads them. Torch-free."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.model_files.timed_pattern import PatternTime, TimedPattern, check_pattern

_MOST_CHARACTERS = 20_000  # an alternative for each module of a large model is long
_MOST_PATTERNS = 1000  # plain names are not counted
_PLAIN = re.compile(r"(\^?)((?:[A-Za-z0-9_.-]|\\\.)+)\$?")  # a name, with or without marks of its beginning and end
_FIX = "Use a regular expression of Python's re module, or a list of modules' names."


def module_pattern(text: Any, where: str, left: PatternTime) -> TimedPattern:
    """Compile a pattern. `where`: the file and its field, for errors. Raise `StartupError` if it is invalid."""
    refused = partial(_refused, text, where)
    if not isinstance(text, str):
        raise refused("is no text")
    return TimedPattern(text, refused, _MOST_CHARACTERS, left)


def _refused(text: Any, where: str, problem: str) -> StartupError:
    return StartupError(f"{where} has a pattern that {problem}: {shown(text)}.", _FIX)


class ModulePatterns:
    """Regular expressions, each for every module whose name it matches as a whole or after a dot.

    Tables often have a name for each module, so plain names are looked up instead of matched.
    """

    def __init__(self, patterns: Iterable[str], where: str, left: PatternTime) -> None:
        self._known: dict[str, int | None] = {}  # results of `first`
        self._plain: dict[str, int] = {}
        others: list[tuple[int, str]] = []
        for index, pattern in enumerate(patterns):
            if (match := _PLAIN.fullmatch(pattern)) is not None:
                self._plain.setdefault(match[1] + match[2].replace("\\.", "."), index)
            else:
                others.append((index, pattern))
        if len(others) > _MOST_PATTERNS:
            raise StartupError(f"{where} has more than {_MOST_PATTERNS} regular expressions.", _FIX)
        for _, pattern in others:
            check_pattern(pattern, partial(_refused, pattern, where), _MOST_CHARACTERS, left)  # by itself
        self._patterns = [(index, module_pattern(rf"(?:.*\.)?(?:{pattern})", where, left)) for index, pattern in others]

    def first(self, module: str) -> int | None:
        """Return the index of the first pattern that is for `module`; None if there is none."""
        if module not in self._known:
            self._known[module] = self._search(module)
        return self._known[module]

    def _search(self, module: str) -> int | None:
        names = (*ends(module), f"^{module}")
        plain = min((self._plain[name] for name in names if name in self._plain), default=None)
        for index, pattern in self._patterns:
            if plain is not None and plain < index:
                return plain
            if pattern.fullmatch(module):
                return index
        return plain


def ends(module: str) -> list[str]:
    """Return the name and its ends after each dot, the longest first."""
    parts = module.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
