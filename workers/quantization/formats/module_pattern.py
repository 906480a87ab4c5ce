"""Regular expressions of a checkpoint's settings, matched against the names of modules.

They are untrusted input, and some take longer than anyone can wait: `(.*)*x`, or `.*.*.*.*x`. All matches of one
pattern together have `LIMIT_S` of time; a pattern that needs more is refused. The patterns of published checkpoints
need almost no time.
"""

import time
from functools import cache
from types import ModuleType

from oarlock.base.errors import StartupError, shown

MOST_CHARACTERS = 500
LIMIT_S = 1.0
_FIX = "Use a checkpoint whose quantisation settings name the modules by a simpler pattern."


class ModulePattern:
    """One compiled pattern."""

    def __init__(self, text: str, location: str) -> None:
        """Compile `text`. `location`: the setting that holds it, for errors. Raise `StartupError` if it is invalid or
        too long."""
        self._text, self._location = text, location
        self._left_s = LIMIT_S
        if len(text) > MOST_CHARACTERS:
            raise self._refused(f"has more than {MOST_CHARACTERS} characters")
        try:
            self._compiled = _engine().compile(text)
        except (_engine().error, OverflowError, RecursionError) as error:
            raise self._refused(f"is not a regular expression ({error})") from None

    def matches(self, module: str) -> bool:
        """Return whether the pattern matches the beginning of a module's name. Raise `StartupError` if out of time."""
        begun = time.perf_counter()
        try:
            found = self._compiled.match(module, timeout=max(self._left_s, 1e-3)) is not None
        except TimeoutError:
            self._left_s = 0.0
        else:
            self._left_s -= time.perf_counter() - begun
        if self._left_s <= 0:
            raise self._refused(f"takes more than {LIMIT_S:g} s to match the names of modules")
        return found

    def _refused(self, problem: str) -> StartupError:
        return StartupError(f"the checkpoint's quantisation has a pattern in {self._location} that {problem}: "
                            f"{shown(self._text)}.", _FIX)  # fmt: skip


@cache
def _engine() -> ModuleType:
    """Return the module `regex`, which transformers needs as well. Matching with `re` cannot be stopped."""
    import regex  # imported here because device checks run without it and without checkpoints

    return regex
