"""The server that a chat starts for itself: on a free port of loopback, with its own key. It ends with the chat.

Run as a program, this module is that server: `python -m oarlock.server.cli.chat.own_server --parent PID serve …`.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from oarlock.base.errors import StartupError
from oarlock.base.python_child import HUB_SECRETS, die_with_parent, start_python

_URL = re.compile(r"^  URL +(\S+)$", re.MULTILINE)
_PROGRESS = re.compile(r"^[a-z][a-z ]* +\d+%.*$", re.MULTILINE)
_EVERY_S = 0.05
_LEAVE_S = 20.0
# Flags whose values the chat decides.
_OWN_FLAGS = ("--host", "--port", "--api-key", "--uds")


class OwnServer:
    """Server of one chat, as a context manager: leaving it ends the server. `url` is set by `wait`."""

    def __init__(self, model: str | None, flags: Sequence[str]) -> None:
        """Start the server. `flags`: of `oarlock serve`."""
        self.url = ""
        self.key = secrets.token_hex(16)
        self._log = tempfile.NamedTemporaryFile("w+b", prefix="oarlock-chat-", suffix=".log")  # noqa: SIM115
        module = "oarlock.server.cli.chat.own_server"
        words = ["-m", module, "--parent", str(os.getpid()), "serve", *([model] if model else []), *flags]
        self._process = start_python(
            [*words, "--host", "127.0.0.1", "--port", "0"],
            output=self._log.fileno(),
            environment={"OARLOCK_API_KEY": self.key},
            secrets=HUB_SECRETS,
        )

    def __enter__(self) -> "OwnServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its own processes end with it
            self._process.wait()
        self._log.close()

    def wait(self, on_progress: Callable[[str], None]) -> None:
        """Wait until it is ready; `on_progress` gets the newest line of its start. Raises `StartupError` if it ends."""
        while True:
            has_ended = self._process.poll() is not None
            log = self.log
            if match := _URL.search(log):
                self.url = match[1]
                return
            if has_ended:
                raise self.failure()
            if lines := _PROGRESS.findall(log):
                on_progress(lines[-1])
            time.sleep(_EVERY_S)

    @property
    def log(self) -> str:
        """Output of the server so far."""
        return Path(self._log.name).read_text("utf-8", "replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> StartupError:
        """Return an error with the reason why the server ended, in its own words if its log has them."""
        log, code = self.log, self._process.returncode
        cause, fix = (re.findall(rf"^{word}: (.*)$", log, re.MULTILINE)[-1:] for word in ("error", "fix"))
        if cause and fix:
            return StartupError(cause[0], fix[0], code)
        last = " ".join(log.split()[-40:])
        return StartupError(
            f"The server exited with status {code}: {last}", "Run `oarlock serve` by itself to see why.", 3
        )


def own_flag(flags: Sequence[str]) -> str | None:
    """Return the first of these flags that a chat sets itself."""
    return next((word for word in flags if word.split("=")[0].replace("_", "-") in _OWN_FLAGS), None)


def main(words: Sequence[str]) -> int:
    """Run the server until the process `--parent` ends or stops it."""
    die_with_parent(int(words[1]), signal.SIGTERM)
    os.setsid()  # Ctrl-C at the chat's terminal stops a response, not the server
    from oarlock.server.cli.main import main as oarlock

    return oarlock(words[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
