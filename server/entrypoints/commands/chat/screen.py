"""What a chat shows: answers as Markdown while they are written, on a terminal; plain text elsewhere."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from server.entrypoints.commands.chat.markdown_blocks import MarkdownBlocks
from server.entrypoints.terminal_text import fit

_REDRAW_S = 0.05
_LONG_BLOCK = 4_000  # characters; a longer one is shown as it is until it ends, since it is drawn many times


class Screen:
    """An answer on a terminal: `begin`, then `thought` and `said` in a running event loop, then `end`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._blocks = MarkdownBlocks()
        self._thinks = False
        self._drawn_at = 0.0
        self._redraw: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """An answer follows."""
        self._blocks = MarkdownBlocks()
        self._live = Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()

    def thought(self, text: str) -> None:
        """A piece of the reasoning that comes before the answer."""
        if not self._thinks:
            self._end_block()
            self._thinks = True
        self._add(text)

    def said(self, text: str) -> None:
        """A piece of the answer."""
        if self._thinks:
            self._end_block()
            self._thinks = False
        self._add(text)

    def end(self) -> None:
        """The answer is over, or broke off."""
        if self._redraw is not None:
            self._redraw.cancel()
            self._redraw = None
        if self._live is not None:
            self._end_block()
            self._live.stop()
        self._live, self._thinks = None, False

    def notice(self, text: str) -> None:
        """A line of the program's own."""
        self.console.print(Text(fit(text), style="dim"))

    def problem(self, text: str) -> None:
        """A line about what went wrong."""
        self.console.print(Text(fit(text), style="red"))

    def _add(self, text: str) -> None:
        for block in self._blocks.add(fit(text)):
            self._print(block)
        if self._redraw is None:  # at once, or soon after the last time, whether or not more comes until then
            wait = self._drawn_at + _REDRAW_S - time.monotonic()
            self._redraw = asyncio.get_running_loop().call_later(max(0.0, wait), self._draw_rest)

    def _draw_rest(self) -> None:
        self._redraw, self._drawn_at = None, time.monotonic()
        if self._live is not None:
            self._live.update(_Bottom(self._drawn(self._blocks.rest)), refresh=True)

    def _end_block(self) -> None:
        rest, self._blocks = self._blocks.rest, MarkdownBlocks()
        if self._live is not None:
            self._live.update(Text(""))
        if rest.strip():
            self._print(rest)

    def _print(self, block: str) -> None:
        self.console.print(self._drawn(block.strip("\n"), whole=True))
        self.console.print()

    def _drawn(self, text: str, whole: bool = False) -> RenderableType:
        if self._thinks:
            return Text(text, style="dim italic")
        if len(text) > _LONG_BLOCK and not whole:
            return Text(text[-_LONG_BLOCK:])
        return Markdown(text, hyperlinks=False)  # a link's address is shown, whatever its text claims


class _Bottom:
    """The last lines of something, as many as the terminal has room for: what is above could not be drawn over."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        for line in lines[-max(1, console.size.height - 1) :]:
            yield from line
            yield Segment.line()


class PlainScreen:
    """An answer in a pipe or a file: its text alone. Notices and problems go to standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ends_line = True

    def begin(self) -> None:
        self._ends_line = True

    def thought(self, text: str) -> None:
        """Left out: what reads this wants the answer."""

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
    """For standard output as it is."""
    if not sys.stdout.isatty():
        return PlainScreen(sys.stdout)
    return Screen(Console(highlight=False)) if interactive else PlainScreen(sys.stdout)
