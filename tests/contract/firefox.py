"""Debian's Firefox for tests, driven by Marionette, the protocol that it speaks itself: JSON over a loopback socket."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 60.0  # only keeps a broken test from hanging
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name of a reference to an element, by the WebDriver standard


class Firefox:
    """One window."""

    def __init__(self, port: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._read()  # its greeting
        self._call("WebDriver:NewSession", {})

    def open(self, url: str) -> None:
        """Open an address."""
        self._call("WebDriver:Navigate", {"url": url})

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return self._call("WebDriver:ExecuteScript", {"script": script, "args": []})["value"]

    def wait(self, script: str) -> None:
        """Wait until a script returns true."""
        deadline = time.monotonic() + LIMIT_S
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        """Type into an element; a line end is Enter."""
        found = self._call("WebDriver:FindElement", {"using": "css selector", "value": selector})["value"]
        self._call("WebDriver:ElementSendKeys", {"id": found[_ELEMENT], "text": text.replace("\n", "\ue007")})

    def close(self) -> None:
        self._socket.close()

    def _call(self, name: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, name, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self._read()
        assert (number, error) == (self._number, None), f"{name}: {error}"
        return result

    def _read(self) -> Any:
        length = b""
        while (one := self._file.read(1)) != b":":
            length += one
        return json.loads(self._file.read(int(length)))


@contextlib.contextmanager
def running() -> Iterator[Firefox]:
    """A window of Firefox with a profile of its own. Skips the test where there is none."""
    executable = shutil.which("firefox-esr") or shutil.which("firefox")
    if executable is None:
        pytest.skip("needs Firefox (Debian's package firefox-esr)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as profile:
        Path(profile, "user.js").write_text(f'user_pref("marionette.port", {port});\n')
        command = [executable, "--headless", "--no-remote", "--profile", profile, "--marionette"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            window = Firefox(port)
            yield window
            window.close()
        finally:
            process.terminate()
            process.wait(30)
