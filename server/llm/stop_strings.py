"""Stop strings in a text that arrives in pieces. Knows nothing of tokens.

A match ends at the first character that completes any stop string; when several complete there, the longest wins. The
answer is therefore the same however the text is cut into pieces. Text is held back only while it is the beginning of a
stop string: exactly as long as the longest real partial match.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Stop strings with their failure tables: built once per request, shared by its choices."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        self.failures = [_failure_table(stop) for stop in self.stops]
        self.first_characters = frozenset(stop[0] for stop in self.stops)

    def __bool__(self) -> bool:
        return bool(self.stops)


class StopStringMatcher:
    """Finds stop strings in a growing text. `push` returns what may be shown now and the stop string found, if any."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._set = stops
        self._include = include  # the match itself is shown, so that nothing need ever be held back
        self._matched = [0] * len(stops.stops)  # per stop string: how much of it the text ends with
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Feed a piece. After a match everything is swallowed."""
        if self.found is not None:
            return "", self.found
        if not self._set:
            return text, None
        for position, character in enumerate(text):
            longest = self._step(character)
            if longest is not None:
                self.found = longest
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown if self._include else shown[: len(shown) - len(longest)], longest
        if self._include:
            return text, None
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """Return the text that was held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._matched)
        return held

    def _step(self, character: str) -> str | None:
        """Advance every partial match; returns the longest stop string that `character` completes."""
        matched = self._matched
        if character not in self._set.first_characters and not any(matched):
            return None
        longest = None
        for index, stop in enumerate(self._set.stops):
            failure = self._set.failures[index]
            size = matched[index]
            while size and stop[size] != character:
                size = failure[size - 1]
            if stop[size] == character:
                size += 1
            if size == len(stop):
                if longest is None or len(stop) > len(longest):
                    longest = stop
                size = failure[size - 1]  # keeps `stop[size]` in range; the caller stops here anyway
            matched[index] = size
        return longest


def _failure_table(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    size = 0
    for index in range(1, len(pattern)):
        while size and pattern[index] != pattern[size]:
            size = table[size - 1]
        if pattern[index] == pattern[size]:
            size += 1
        table[index] = size
    return table
