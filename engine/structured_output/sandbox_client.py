"""Client of the compile sandbox in the engine: one process, started when first needed, and again when it was lost.

Knows the lines that are sent to and from the process. Does not know what is done with its answers.
"""

import json
import logging
import os
import socket
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path

from oarlock.engine.sampling_params import Grammar
from oarlock.workers.python_child import start_python

logger = logging.getLogger("oarlock.engine")

_MODULE = ("-m", "oarlock.engine.structured_output.sandbox")
_ATTEMPTS = 2  # the process may have been lost for a reason that has nothing to do with this grammar


class SandboxLostError(Exception):
    """The process ended before it had answered, twice."""


class CompileSandbox:
    """Tries grammars in another process. Each of its connections belongs to one thread, which waits for the answer."""

    def __init__(self, tokenizer_file: Path, num_connections: int) -> None:
        self._tokenizer_file = tokenizer_file
        self._num_connections = num_connections
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[socket.socket] = []
        self._is_closed = False

    def check(self, number: int, grammar: Grammar) -> str | None:
        """Try to compile `grammar`: None when it compiles in time, else the reason. Raises `SandboxLostError`.

        `number` is that of the calling thread's connection.
        """
        line = json.dumps(asdict(grammar)).encode() + b"\n"
        for _ in range(_ATTEMPTS):
            connection = self._connection(number)
            try:
                connection.sendall(line)
                answer = _read_line(connection)
            except OSError:
                answer = b""
            if answer:
                return json.loads(answer)["problem"]
            self._lost(connection)
        raise SandboxLostError

    def close(self) -> None:
        """End the process; threads that wait for an answer get `SandboxLostError`."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _connection(self, number: int) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise SandboxLostError
            if self._process is None:
                self._start()
            return self._connections[number]

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self._num_connections)]
        self._connections = [ours for ours, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        named = ["--tokenizer", str(self._tokenizer_file), "--parent", str(os.getpid())]
        self._process = start_python(
            [*_MODULE, *named, *(part for fd in fds for part in ("--fd", str(fd)))], pass_fds=fds
        )
        for _, theirs in pairs:
            theirs.close()
        logger.info("event=grammar_sandbox_started pid=%d", self._process.pid)

    def _lost(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._connections:  # the other threads find their connections closed and come here too
                logger.warning("event=grammar_sandbox_lost")
                self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it, which closing would not
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def _read_line(connection: socket.socket) -> bytes:
    """Read one answer; empty when the connection has ended before it."""
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""
