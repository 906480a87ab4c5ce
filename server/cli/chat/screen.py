"""Display of a chat: answers as Markdown while they are written, on a terminal; plain text elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import TextIO

from rich.console import Console, RenderableType
from rich.markdown import Markdown
from rich.text import Text

from oarlock.server.cli.chat.markdown_blocks import MarkdownBlocks
from oarlock.server.cli.chat.redrawn import RedrawnLines, typing_hidden
from oarlock.server.cli.terminal_text import fit

_REDRAW_S = 0.05
_LONG_BLOCK = 4_000  # characters; a longer one is shown as it is until it ends, since it is drawn many times


class Screen:
    """An answer on a terminal: `begin`, then `thought` and `said`, all in a running event loop, then `end`.

    Ctrl-Z in between gives the terminal back as it was, and takes it again when the chat goes on.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lines = RedrawnLines(console)
        self._until_end = ExitStack()  # what is other than usual while an answer is shown
        self._blocks = MarkdownBlocks()
        self._thinks = False
        self._drawn_at = 0.0
        self._redraw: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin an answer."""
        self._blocks = MarkdownBlocks()
        self._take_terminal()

    def thought(self, text: str) -> None:
        """Show a piece of the reasoning that comes before the answer."""
        if not self._thinks:
            self._end_block()
            self._thinks = True
        self._add(text)

    def said(self, text: str) -> None:
        """Show a piece of the answer."""
        if self._thinks:
            self._end_block()
            self._thinks = False
        self._add(text)

    def end(self) -> None:
        """End an answer, whole or broken off."""
        if self._redraw is not None:
            self._redraw.cancel()
            self._redraw = None
        with self._until_end:
            self._end_block()
        self._thinks = False

    def notice(self, text: str) -> None:
        """Show a line of the program itself."""
        self.console.print(Text(fit(text), style="dim"))

    def problem(self, text: str) -> None:
        """Show an error in one line."""
        self.console.print(Text(fit(text), style="red"))

    def _take_terminal(self) -> None:
        self._until_end.enter_context(typing_hidden(sys.stdin))
        self.console.show_cursor(False)
        self._until_end.callback(self.console.show_cursor, True)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTSTP, self._stop)  # between two drawings, never within one
        self._until_end.callback(loop.remove_signal_handler, signal.SIGTSTP)

    def _stop(self) -> None:
        """Stop the process, as Ctrl-Z does without a handler; this returns when the shell lets it go on."""
        self._lines.erase()
        self._until_end.close()
        signal.raise_signal(signal.SIGTSTP)
        self._take_terminal()
        self._add("")

    def _add(self, text: str) -> None:
        for block in self._blocks.add(fit(text)):
            self._print(block)
        if self._redraw is None:  # at once, or soon after the last time, whether or not more comes until then
            wait = self._drawn_at + _REDRAW_S - time.monotonic()
            self._redraw = asyncio.get_running_loop().call_later(max(0.0, wait), self._draw_rest)

    def _draw_rest(self) -> None:
        self._redraw, self._drawn_at = None, time.monotonic()
        self._lines.draw(self._drawn(self._blocks.rest))

    def _end_block(self) -> None:
        rest, self._blocks = self._blocks.rest, MarkdownBlocks()
        self._lines.erase()
        if rest.strip():
            self._print(rest)

    def _print(self, block: str) -> None:
        with self.console:  # in one write
            self._lines.erase()
            self.console.print(self._drawn(block.strip("\n"), whole=True))
            self.console.print()

    def _drawn(self, text: str, whole: bool = False) -> RenderableType:
        if self._thinks:
            return Text(text, style="dim italic")
        if len(text) > _LONG_BLOCK and not whole:
            return Text(text[-_LONG_BLOCK:])
        return Markdown(text, hyperlinks=False)  # a link's address is shown, whatever its text claims


class PlainScreen:
    """An answer in a pipe or a file: its text alone. Notices and problems go to standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ends_line = True

    def begin(self) -> None:
        self._ends_line = True

    def thought(self, text: str) -> None:
        """Leaves reasoning out: a program that reads this output wants the answer."""

    def said(self, text: str) -> None:
        self._stream.write(fit(text) if self._stream.isatty() else text)
        self._stream.flush()
        self._ends_line = text.endswith("\n")

    def end(self) -> None:
        if not self._ends_line:
            self._stream.write("\n")
            self._stream.flush()

    def notice(self, text: str) -> None:
        sys.stderr.write(f"note: {fit(text)}\n")

    def problem(self, text: str) -> None:
        sys.stderr.write(f"error: {fit(text)}\n")


def make_screen(*, interactive: bool) -> Screen | PlainScreen:
    """Choose the screen that fits standard output."""
    if not interactive or not sys.stdout.isatty():
        return PlainScreen(sys.stdout)
    # COLUMNS and LINES are the size when a shell exported them; what is redrawn needs the terminal's present one.
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Screen(Console(highlight=False, _environ=variables))
