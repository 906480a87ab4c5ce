"""Reads what the user types: lines with history and completion, and messages of several lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

try:
    import readline
except ImportError:  # some builds of Python have none: lines can be typed, without history
    readline = None

QUOTES = '"""'
_MAX_LINES = 1_000
_PROMPT, _MORE = "> ", "… "


def history_file() -> Path:
    """File in which typed lines are kept between chats."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "oarlock" / "chat_history"


class LineEditor:
    """Editor of typed messages: `read` returns one. Use as a context manager: leaving it writes the history."""

    def __init__(self, commands: Sequence[str], keep: Path | None) -> None:
        """`commands`: what the tab key completes at the beginning. `keep`: the file of the history, or none."""
        self._commands = commands
        self._keep = keep

    def __enter__(self) -> LineEditor:
        if readline is not None:
            readline.set_completer(self._complete)
            readline.set_completer_delims(" \t\n")
            is_libedit = "libedit" in (readline.__doc__ or "")
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
            readline.set_history_length(_MAX_LINES)
            if self._keep is not None:
                with suppress(OSError):  # the first chat, or a file that is no history: begin with none
                    readline.read_history_file(self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        if readline is None or self._keep is None:
            return
        try:
            self._keep.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self._keep, os.O_CREAT | os.O_WRONLY, 0o600))  # what was asked is nobody else's
            readline.write_history_file(self._keep)
        except OSError as problem:
            sys.stderr.write(f"note: the history was not kept: {problem}\n")

    def read(self) -> str:
        """A line; several where one ends with a backslash, or between lines of three quotes.

        Raises `EOFError` at the end of the input, `KeyboardInterrupt` at Ctrl-C.
        """
        line = input(_PROMPT)
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
            found = _files(text) if readline.get_line_buffer().startswith(("/save", "/load")) else []
        return found[state] if state < len(found) else None


def _files(text: str) -> list[str]:
    """Paths that begin with this text."""
    folder, _, name = text.rpartition("/")
    path = Path(f"{folder}/" if "/" in text else ".").expanduser()
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in path.iterdir())
    except OSError:
        return []
    return [f"{folder}/{entry}" if "/" in text else entry for entry in names if entry.startswith(name)]
