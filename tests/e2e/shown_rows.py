"""The rows that a terminal shows after what a program wrote to it, with the few escapes of text that is redrawn."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b])", re.DOTALL)


class ShownRows:
    """A terminal without an upper edge, which breaks lines anew when its width changes, as most do today."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[tuple[str, bool]] = [("", False)]  # text, and whether it continues the row above
        self._row = self._column = 0

    @property
    def text(self) -> str:
        """All rows, without the spaces at their ends."""
        return "\n".join(text.rstrip() for text, _ in self._rows)

    def feed(self, raw: str) -> None:
        """Feed text that the program wrote."""
        for piece in _PIECE.finditer(raw):
            number, command, motion, character = piece.groups()
            if character:
                self._put(character)
            elif motion == "\r":
                self._column = 0
            elif motion == "\n":
                self._down(continues=False)
            elif command == "A":
                self._row = max(0, self._row - int(number or 1))
            elif command == "J":
                self._cut(self._column)
                del self._rows[self._row + 1 :]
            elif command == "K":
                self._cut(0 if number == "2" else self._column)
            else:
                assert command in "mhl", f"the escape {piece[0]!r} is not known here"

    def resize(self, columns: int) -> None:
        """Break the lines at another width; the cursor stays at its character."""
        lines, cursor = list[str](), (0, 0)
        for number, (text, continues) in enumerate(self._rows):
            if not continues:
                lines.append("")
            if number == self._row:
                cursor = len(lines) - 1, len(lines[-1]) + self._column
            lines[-1] += text
        self._columns, self._rows = columns, []
        for number, line in enumerate(lines):
            first = len(self._rows)
            self._rows += [(line[at : at + columns], at > 0) for at in range(0, max(1, len(line)), columns)]
            if number == cursor[0]:
                last = len(self._rows) - 1 - first
                self._row = first + min(cursor[1] // columns, last)
                self._column = cursor[1] - columns * (self._row - first)

    def _put(self, character: str) -> None:
        if self._column == self._columns:
            self._column = 0
            self._down(continues=True)
        text, continues = self._rows[self._row]
        text = text.ljust(self._column)
        self._rows[self._row] = text[: self._column] + character + text[self._column + 1 :], continues
        self._column += 1

    def _down(self, *, continues: bool) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(("", continues))

    def _cut(self, column: int) -> None:
        text, continues = self._rows[self._row]
        self._rows[self._row] = text[:column], continues
