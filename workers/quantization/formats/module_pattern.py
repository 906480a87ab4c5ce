"""Regular expressions of a checkpoint's quantisation, matched against the names of modules."""

from oarlock.base.errors import StartupError, shown
from oarlock.workers.model_files.timed_pattern import LIMIT_S, PatternTime, TimedPattern

MOST_CHARACTERS = 500
_FIX = "Use a checkpoint whose quantisation settings name the modules by a simpler pattern."


class ModulePattern:
    """One compiled pattern, with a limit of time of its own."""

    def __init__(self, text: str, location: str) -> None:
        """Compile `text`. `location`: the setting that holds it, for errors. Raise `StartupError` if it is invalid or
        too long."""
        self._text, self._location = text, location
        self._compiled = TimedPattern(text, self._refused, MOST_CHARACTERS, PatternTime(LIMIT_S))

    def matches(self, module: str) -> bool:
        """Return whether the pattern matches the beginning of a module's name. Raise `StartupError` if out of time."""
        return self._compiled.match(module) is not None

    def _refused(self, problem: str) -> StartupError:
        return StartupError(f"the checkpoint's quantisation has a pattern in {self._location} that {problem}: "
                            f"{shown(self._text)}.", _FIX)  # fmt: skip
