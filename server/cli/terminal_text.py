"""Text from elsewhere made fit for a terminal: a model must not move the cursor, or reverse what is shown."""

from __future__ import annotations

import re

# Control characters but tab and newline, those of the second set, and what changes the direction of writing.
_UNFIT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def fit(text: str) -> str:
    """Replace every control character in `text` by its picture (an escape as `␛`) or by `�`."""
    return _UNFIT.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x20:
        return chr(0x2400 + number)
    return "␡" if number == 0x7F else "\N{REPLACEMENT CHARACTER}"
