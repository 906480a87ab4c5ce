"""The terminal of a chat: reads typed messages, and shows responses as Markdown while they are written.

Typed messages have history and completion, and a paste of several lines is one message. Without a terminal a response
is plain text. Blocks of Markdown that will not change any more are printed once and scroll away; only the last block is
redrawn, and so are two responses next to each other. Two things would make the number of rows to go back wrong: keys
that the terminal itself shows between two drawings, and making the terminal narrower, which wraps existing lines.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.control import Control
from rich.markdown import Markdown
from rich.segment import ControlType, Segment, Segments
from rich.table import Table
from rich.text import Text

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand, home
from oarlock.server.cli.remote import fit

try:
    import readline
except ImportError:  # some builds of Python lack it: lines can be typed, without history
    readline = None

QUOTES = '"""'
_MAX_KEPT = 1_000  # messages in the history
_PROMPT, _MORE = "> ", "… "
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_LIST = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")
_REDRAW_S = 0.05
_LONG_BLOCK = 4_000  # characters; a longer block is shown as plain text until it ends, since it is drawn many times


def history_file() -> Path | None:
    """Return the file in which typed messages are kept between chats, or None if this user has no home."""
    own, given = home(), os.environ.get("XDG_STATE_HOME")
    state = expand(given) if given else own and own / ".local/state"
    return state and state / "oarlock" / "chat_history"


class History:
    """Typed messages in a file that only this user may read, a line for each. Each is saved when it is typed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the newest messages; none if the file is missing or not a history. Cuts a file that has grown."""
        try:
            lines = self._path.read_bytes().decode().removesuffix("\n").split("\n") if self._path.exists() else []
            if len(lines) > 2 * _MAX_KEPT:
                shorter = self._path.with_suffix(f".{os.getpid()}")
                self._write(shorter, os.O_TRUNC, "".join(f"{line}\n" for line in lines[-_MAX_KEPT:]))
                shorter.replace(self._path)
        except (OSError, UnicodeDecodeError):
            return []
        return [
            re.sub(r"\\([\\n])", lambda found: "\n" if found[1] == "n" else "\\", line) for line in lines[-_MAX_KEPT:]
        ]

    def add(self, message: str) -> None:
        """Append a message. Raises `OSError`."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write(self._path, os.O_APPEND, message.replace("\\", "\\\\").replace("\n", "\\n") + "\n")

    @staticmethod
    def _write(path: Path, how: int, text: str) -> None:
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | how, 0o600), "w", encoding="utf-8", newline="") as file:
            os.fchmod(file.fileno(), 0o600)  # the messages are private
            file.write(text)


class LineEditor:
    """Editor of typed messages: `read` returns one. Use as a context manager."""

    def __init__(self, commands: Sequence[str], history: History | None) -> None:
        """Prepare the editor. `commands`: completed by the tab key at the beginning of a line. `history`: keeps the
        messages, if set."""
        self._commands = commands
        self._history = history
        self._last = ""

    def __enter__(self) -> "LineEditor":
        if readline is not None:
            readline.set_completer(self._complete)
            readline.set_completer_delims(" \t\n")
            is_libedit = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
            if not is_libedit:  # the terminal marks pasted text, so its newlines send nothing
                readline.parse_and_bind("set enable-bracketed-paste on")
            readline.set_auto_history(False)  # otherwise it would keep single lines
            for message in [] if self._history is None else self._history.read():
                readline.add_history(message)
        return self

    def __exit__(self, *error: object) -> None:
        if readline is not None:
            readline.set_auto_history(True)

    def read(self) -> str:
        """Read a line, or several if they were pasted, if a line ends with a backslash, or between lines of three
        quotes.

        Raises `EOFError` at the end of the input, `KeyboardInterrupt` at Ctrl-C.
        """
        message = self._message().rstrip("\n")
        if message.strip() and message != self._last:
            self._last = message
            if readline is not None:
                readline.add_history(message)
            try:
                if self._history is not None:
                    self._history.add(message)
            except OSError as problem:
                self._history = None
                sys.stderr.write(f"note: the history is not saved: {problem}\n")
        return message

    def _message(self) -> str:
        line = input(_PROMPT)
        if "\n" in line:
            return line
        if line.strip().startswith(QUOTES):
            return self._until_quotes(line.strip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(_MORE))
        return "\n".join(lines)

    def _until_quotes(self, first: str) -> str:
        if first.rstrip().endswith(QUOTES):
            return first.rstrip().removesuffix(QUOTES)
        lines = [first] if first else []
        while True:
            line = input(_MORE)
            if line.rstrip().endswith(QUOTES):
                last = line.rstrip().removesuffix(QUOTES)
                return "\n".join([*lines, last] if last else lines)
            lines.append(line)

    def _complete(self, text: str, state: int) -> str | None:
        assert readline is not None
        if readline.get_begidx() == 0:
            found = [name for name in self._commands if name.startswith(text)]
        else:
            found = _files(text) if readline.get_line_buffer().startswith(("/save", "/load", "/attach")) else []
        return found[state] if state < len(found) else None


def _files(text: str) -> list[str]:
    """Return the paths that begin with this text."""
    folder, _, name = text.rpartition("/")
    try:
        path = expand(f"{folder}/" if "/" in text else ".")
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
    except (OSError, StartupError):
        return []
    return [f"{folder}/{entry}" if "/" in text else entry for entry in names if entry.startswith(name)]


class RedrawnLines:
    """Lines of a terminal that each `draw` replaces. In between the cursor is at the start of the row below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []  # widths of the shown lines, in columns

    def draw(self, shown: RenderableType) -> None:
        """Show the last lines of `shown`, up to the number that can be redrawn; nothing if the cursor cannot be
        moved."""
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
        """Remove the lines that are shown."""
        if self._widths:
            columns = max(1, self._console.size.width)
            rows = sum(max(1, -(-width // columns)) for width in self._widths)
            code = Control(ControlType.CARRIAGE_RETURN, (ControlType.CURSOR_UP, rows))
            code.segment = Segment(f"{code.segment.text}\x1b[J", None, code.segment.control)
            self._console.control(code)
        self._widths = []


def _without_end(line: list[Segment]) -> list[Segment]:
    """Cut the spaces up to the edge from `line`: with them it would wrap as soon as the terminal is narrower."""
    rest = list(line)
    while rest:
        last = rest.pop()
        if text := last.text.rstrip(" "):
            return [*rest, Segment(text, last.style)]
    return rest


@contextlib.contextmanager
def typing_hidden(terminal: TextIO) -> Generator[None]:
    """Hide the keys typed at `terminal` within the context. A line that is typed is read afterwards; Ctrl-C is still a
    signal, and discards text typed before it. Without a terminal nothing changes."""
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


class MarkdownBlocks:
    """Splitter of growing Markdown into blocks: `add` returns complete blocks, `rest` is the text after them."""

    def __init__(self) -> None:
        self._lines: list[str] = []  # lines of the current block, with their ends
        self._line = ""  # the last line, which has no end yet
        self._fence = ""  # the opening fence of the current code block
        self._is_list = False

    @property
    def rest(self) -> str:
        """Text that belongs to no complete block yet."""
        return "".join(self._lines) + self._line

    def add(self, text: str) -> list[str]:
        """Return the blocks that `text` completes, each as it was written."""
        done: list[str] = []
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            done += self._end_line(line)
        return done

    def _end_line(self, line: str) -> list[str]:
        done = self._before(line)
        self._lines.append(line + "\n")
        match = _FENCE.fullmatch(line)
        if self._fence:
            closes = match is not None and match[1].startswith(self._fence) and not match[2].strip()
            self._fence = "" if closes else self._fence
            return done
        if len(self._lines) == 1:
            self._is_list = _LIST.match(line) is not None
        if match is not None and not (match[1][0] == "`" and "`" in match[2]):
            self._fence = match[1]
        return done

    def _before(self, line: str) -> list[str]:
        """Return the block that ends before `line`, if there is one: after an empty line, unless a list continues."""
        if self._fence or not self._lines or not line.strip() or self._lines[-1].strip():
            return []
        if self._is_list and (line[0] in " \t" or _LIST.match(line)):
            return []
        block = "".join(self._lines)
        self._lines = []
        return [block] if block.strip() else []


@dataclass(slots=True)
class Side:
    """One side of a comparison: receives the pieces of its response."""

    title: str
    on_change: Callable[[], None]
    text: str = ""
    num_reasoning_characters: int = field(default=0)  # characters of reasoning; only whether there is any is shown

    def add_reasoning(self, text: str) -> None:
        self.num_reasoning_characters += len(text)
        self.on_change()

    def add_content(self, text: str) -> None:
        self.text += fit(text)
        self.on_change()


class Screen:
    """A response on a terminal: `begin`, `add_reasoning` and `add_content`, all in a running event loop, then `end`.

    Ctrl-Z in between restores the terminal, and takes it again when the chat continues.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lines = RedrawnLines(console)
        self._until_end = ExitStack()  # restores the terminal after a response
        self._blocks = MarkdownBlocks()
        self._sides: list[Side] = []  # replaces the blocks while two responses are compared
        self._in_reasoning = False
        self._drawn_at = 0.0
        self._redraw: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin a response."""
        self._blocks = MarkdownBlocks()
        self._take_terminal()

    def begin_comparison(self, titles: Sequence[str]) -> list[Side]:
        """Begin responses next to each other, with a listener for each. `end` ends them."""
        self.begin()
        self._sides = [Side(title, self._redraw_soon) for title in titles]
        return self._sides

    def add_reasoning(self, text: str) -> None:
        """Show a piece of the reasoning before the response."""
        if not self._in_reasoning:
            self._end_block()
            self._in_reasoning = True
        self._add(text)

    def add_content(self, text: str) -> None:
        """Show a piece of the response."""
        if self._in_reasoning:
            self._end_block()
            self._in_reasoning = False
        self._add(text)

    def end(self) -> None:
        """End a response, complete or broken off."""
        if self._redraw is not None:
            self._redraw.cancel()
            self._redraw = None
        with self._until_end:
            if self._sides:
                self._lines.erase()
                self.console.print(self._compared(whole=True))
                self._sides = []
            else:
                self._end_block()
        self._in_reasoning = False

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
        loop.add_signal_handler(signal.SIGTSTP, self._stop)  # called between two drawings, never within one
        self._until_end.callback(loop.remove_signal_handler, signal.SIGTSTP)

    def _stop(self) -> None:
        """Stop the process, as Ctrl-Z does without a handler. Returns when the shell continues it."""
        self._lines.erase()
        self._until_end.close()
        signal.raise_signal(signal.SIGTSTP)
        self._take_terminal()
        self._add("")

    def _add(self, text: str) -> None:
        for block in self._blocks.add(fit(text)):
            self._print(block)
        self._redraw_soon()

    def _redraw_soon(self) -> None:
        if self._redraw is None:  # draw at once, or soon after the last time, even if no more text comes
            wait = self._drawn_at + _REDRAW_S - time.monotonic()
            self._redraw = asyncio.get_running_loop().call_later(max(0.0, wait), self._draw_rest)

    def _draw_rest(self) -> None:
        self._redraw, self._drawn_at = None, time.monotonic()
        self._lines.draw(self._compared() if self._sides else self._drawn(self._blocks.rest))

    def _compared(self, *, whole: bool = False) -> RenderableType:
        table = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 1, 0))
        for side in self._sides:
            table.add_column(Text(fit(side.title), style="bold"), ratio=1)
        thinking = Text("(thinks)", style="dim italic")
        table.add_row(
            *(
                self._drawn(side.text, whole) if side.text or not side.num_reasoning_characters else thinking
                for side in self._sides
            )
        )
        return table

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
        if self._in_reasoning:
            return Text(text, style="dim italic")
        if len(text) > _LONG_BLOCK and not whole:
            return Text(text[-_LONG_BLOCK:])
        return Markdown(text, hyperlinks=False)  # shows a link's address, because its text may claim another


class PlainScreen:
    """A response in a pipe or a file: only its text. Notices and problems go to standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ends_line = True
        self._sides: list[Side] = []

    def begin(self) -> None:
        self._ends_line = True

    def begin_comparison(self, titles: Sequence[str]) -> list[Side]:
        """Begin responses that `end` writes one below the other."""
        self._sides = [Side(title, lambda: None) for title in titles]
        return self._sides

    def add_reasoning(self, text: str) -> None:
        """Leave reasoning out: a program that reads this output wants the response."""

    def add_content(self, text: str) -> None:
        self._stream.write(fit(text) if self._stream.isatty() else text)
        self._stream.flush()
        self._ends_line = text.endswith("\n")

    def end(self) -> None:
        for side in self._sides:
            self.add_content(f"{side.title}:\n{side.text.rstrip()}\n")
        self._sides = []
        if not self._ends_line:
            self._stream.write("\n")
            self._stream.flush()

    def notice(self, text: str) -> None:
        sys.stderr.write(f"note: {fit(text)}\n")

    def problem(self, text: str) -> None:
        sys.stderr.write(f"error: {fit(text)}\n")


def make_screen(*, interactive: bool) -> Screen | PlainScreen:
    """Return the screen that fits standard output."""
    if not interactive or not sys.stdout.isatty():
        return PlainScreen(sys.stdout)
    # A shell may have exported old sizes in COLUMNS and LINES. Redrawing needs the terminal's current size.
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Screen(Console(highlight=False, _environ=variables))
