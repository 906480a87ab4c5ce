"""Regular expressions of a checkpoint's or an adapter's settings, matched against the names of modules.

They are untrusted input, and some take longer than anyone can wait: `(.*)*x`, or `.*.*.*.*x`. A limit of time holds for
compiling and matching all patterns that share it; a pattern that needs more is refused. The patterns of published files
need almost no time.
"""

import re
import time
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from oarlock.base.errors import StartupError

LIMIT_S = 1.0
# `regex` matches a group approximately if braces without numbers follow it, such as `{e<=2}`. For `re` they are text.
_APPROXIMATE = re.compile(r"\{(?!\d*,?\d*\})")


class PatternTime:
    """The seconds that are left to compile and match all patterns that share it."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = self.left_s = limit_s


def check_pattern(text: str, refused: Callable[[str], StartupError], most: int, left: PatternTime) -> None:
    """Check that `text`, of at most `most` characters, is a regular expression. Raise the error that `refused` makes of
    a problem."""
    _compiled(re.compile, text, refused, most, left)


def _compiled(
    compile_: Callable[[str], Any], text: str, refused: Callable[[str], StartupError], most: int, left: PatternTime
) -> Any:
    """Return `compile_(text)`, which cannot be stopped: the next pattern is refused if no time is left."""
    if len(text) > most:
        raise refused(f"has more than {most} characters")
    begun = time.thread_time()
    try:
        return compile_(text)
    except (re.error, _engine().error, OverflowError, RecursionError) as error:
        raise refused(f"is not a regular expression ({error})") from None
    finally:
        left.left_s -= time.thread_time() - begun
        if left.left_s <= 0:
            raise refused(f"is one of patterns that take more than {left.limit_s:g} s to read")


class TimedPattern:
    """One compiled pattern."""

    def __init__(self, text: str, refused: Callable[[str], StartupError], most: int, left: PatternTime) -> None:
        """Compile `text`, of at most `most` characters. Raise the error that `refused` makes of a problem, here and in
        the methods."""
        self._refused, self._left = refused, left
        check_pattern(text, refused, most, left)  # `regex` knows further expressions
        if _APPROXIMATE.search(text):
            raise refused("is not a regular expression (a brace without numbers)")
        self._compiled = _compiled(_engine().compile, text, refused, most, left)

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match of the beginning of `name`."""
        return self._timed(self._compiled.match, name)

    def fullmatch(self, name: str) -> re.Match[str] | None:
        """Return the match of all of `name`."""
        return self._timed(self._compiled.fullmatch, name)

    def _timed(self, match: Callable[..., re.Match[str] | None], name: str) -> re.Match[str] | None:
        begun, found = time.perf_counter(), None
        try:
            found = match(name, timeout=max(self._left.left_s, 1e-3))
        except TimeoutError:
            self._left.left_s = 0.0
        else:
            self._left.left_s -= time.perf_counter() - begun
        if self._left.left_s <= 0:
            raise self._refused(f"takes more than {self._left.limit_s:g} s to match the names of modules")
        return found


@cache
def _engine() -> ModuleType:
    """Return the module `regex`, which transformers needs as well. Matching with `re` cannot be stopped."""
    import regex  # imported here because device checks run without it and without checkpoints

    return regex
