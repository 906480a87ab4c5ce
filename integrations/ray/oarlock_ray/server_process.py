"""One `oarlock serve` below this process: started on a free port of loopback, watched, ended.

What it prints is printed again, so that it stands in the log of the replica. Knows neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oarlock_ray.arguments import ArgumentError, last_error

_URL = re.compile(r"^  URL +(\S+)$")  # of the lines that Oarlock prints when it is ready
_KEPT_LINES = 40
_AFTER_DRAIN_S = 15.0


class ServerProcess:
    """Make it, `start`, and `stop` in the end. Its methods belong to one event loop."""

    def __init__(self, command: Sequence[str], drain_timeout_s: float) -> None:
        """`command`: `oarlock serve ...` without address and port."""
        self._command = [*command, "--host", "127.0.0.1", "--port", "0"]
        self._drain_timeout_s = drain_timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self.stopping = False  # it was asked to end

    async def start(self) -> str:
        """The URL of the server once it is ready. Raises `ArgumentError` with the cause and the fix that it printed."""
        self.launch()
        await asyncio.wait((self._url, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if self._url.done():
            return self._url.result()
        raise self.error()

    def error(self) -> ArgumentError:
        """The cause and the fix that it printed, once it has ended."""
        status = self._ended.result()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return ArgumentError(*last_error("\n".join(self._printed), f"The server {how}."))

    def launch(self) -> None:
        """Start the process."""
        loop = asyncio.get_running_loop()
        self._url: asyncio.Future[str] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        launcher = Path(__file__).with_name("with_parent.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(launcher), str(os.getpid()), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self._process, loop), name="oarlock-output", daemon=True).start()

    async def wait(self) -> int:
        """The exit status, negative for a signal, once the process has ended."""
        return await asyncio.shield(self._ended)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        """SIGTERM; it drains for as long as it was told to. One that has not ended 15 s later is killed."""
        self.stopping = True
        if self._process is None or self._ended.done():
            return
        self._process.terminate()
        done, _ = await asyncio.wait((self._ended,), timeout=self._drain_timeout_s + _AFTER_DRAIN_S)
        if not done:
            self._process.kill()
            await self._ended

    def _read(self, process: subprocess.Popen[str], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: every line until the last, then the exit status."""
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            self._printed.append(line.rstrip("\n"))
            if found := _URL.match(self._printed[-1]):
                loop.call_soon_threadsafe(_settle, self._url, found[1])
        loop.call_soon_threadsafe(_settle, self._ended, process.wait())


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
