"""A program in a pseudo-terminal, as a person at a keyboard has it: type, and wait for what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][0-9A-B]|[=>])")
_BEGUN = re.compile(r"\x1b(\[[0-9;?]*[ -/]*|\][^\x07\x1b]*|[()]|)$")  # an escape whose end has not come yet
WITHIN_S = 60.0
CTRL_C, CTRL_D, CTRL_Z, TAB = "\x03", "\x04", "\x1a", "\t"


class Terminal:
    """Use as a context manager: leaving it kills the program if it still runs."""

    def __init__(self, command: Sequence[str], env: dict[str, str], *, columns: int = 100, rows: int = 30) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)

        def own_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C becomes a signal

        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(slave)
        self.raw = ""  # everything that was shown, with its escapes
        self._seen = 0  # up to where `expect` has looked, in `text`

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._master)

    def resize(self, columns: int, rows: int = 30) -> None:
        """Give the window another size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def is_echoing(self) -> bool:
        """Whether the terminal itself shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    @property
    def text(self) -> str:
        """Everything that was shown, without escapes."""
        return _BEGUN.sub("", _ESCAPE.sub("", self.raw)).replace("\r", "")

    def type(self, text: str) -> None:
        """Type the keys of `text`; a newline is the Enter key."""
        os.write(self._master, text.replace("\n", "\r").encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a match in what was shown since the last one."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            match = re.compile(pattern).search(self.text, self._seen)
            if match is not None:
                self._seen = match.end()
                return match
            if time.monotonic() > deadline or not self.look(0.2):
                raise AssertionError(
                    f"{pattern!r} was not shown after:\n{self.text[self._seen :]}\n--- all:\n{self.text}"
                )

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C until `pattern` is shown: Python overlooks one that comes just before it waits for a key."""
        deadline = time.monotonic() + WITHIN_S
        while not re.search(pattern, self.text[self._seen :]):
            assert time.monotonic() < deadline, f"{pattern!r} was not shown:\n{self.text}"
            self.type(CTRL_C)
            patience = time.monotonic() + 5.0
            while not re.search(pattern, self.text[self._seen :]) and time.monotonic() < patience:
                self.look(0.2)
        self.expect(pattern)

    def wait(self) -> int:
        """Wait for the end of the program; return its exit status."""
        while self.look(0.2):
            pass
        return self.process.wait(WITHIN_S)

    def look(self, seconds: float) -> bool:
        """Take in what is there, or comes soon; False once the program has closed the terminal."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)
