"""The lines at the bottom of a terminal that are drawn again and again, so that none of them stays behind.

Two things would spoil the count of rows to go back: keys that the terminal itself shows between two drawings, and a
terminal that is made narrower, which breaks lines that are there already.
"""

from __future__ import annotations

import contextlib
import termios
from collections.abc import Generator
from typing import TextIO

from rich.console import Console, RenderableType
from rich.control import Control
from rich.segment import ControlType, Segment, Segments


class RedrawnLines:
    """Lines of a terminal that each `draw` replaces. In between the cursor is at the start of the row below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []  # of the lines that are shown, in columns

    def draw(self, shown: RenderableType) -> None:
        """Show the last lines of `shown`, as many as can be drawn over. Nothing where the cursor cannot be moved."""
        console = self._console
        if not console.is_terminal or console.is_dumb_terminal:
            return
        lines = console.render_lines(shown, console.options.update(height=None), pad=False)
        lines = [_without_end(line) for line in lines[-max(1, console.size.height - 1) :]]
        with console:  # in one write
            self.erase()
            whole = [segment for line in lines for segment in (*line, Segment.line())]
            console.print(Segments(whole), end="", soft_wrap=True)
        self._widths = [sum(segment.cell_length for segment in line) for line in lines]

    def erase(self) -> None:
        """Take away what is shown."""
        if self._widths:
            columns = max(1, self._console.size.width)
            rows = sum(max(1, -(-width // columns)) for width in self._widths)
            code = Control(ControlType.CARRIAGE_RETURN, (ControlType.CURSOR_UP, rows))
            code.segment = Segment(f"{code.segment.text}\x1b[J", None, code.segment.control)
            self._console.control(code)
        self._widths = []


def _without_end(line: list[Segment]) -> list[Segment]:
    """Cut the spaces up to the edge from `line`: with them it would break as soon as the terminal is narrower."""
    rest = list(line)
    while rest:
        last = rest.pop()
        if text := last.text.rstrip(" "):
            return [*rest, Segment(text, last.style)]
    return rest


@contextlib.contextmanager
def typing_hidden(terminal: TextIO) -> Generator[None]:
    """Hide the keys typed at `terminal` meanwhile. A line that is typed is read afterwards; Ctrl-C is still a signal,
    and discards what was typed before it. Elsewhere than on a terminal nothing changes."""
    if not terminal.isatty():
        yield
        return
    before = termios.tcgetattr(terminal)
    hidden = [*before]
    hidden[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(terminal, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
