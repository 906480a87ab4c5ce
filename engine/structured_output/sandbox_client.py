"""The engine's end of the forge: one process, started when it is first needed, and started again when it was lost.

Knows the forge's lines. Does not know what becomes of a verdict. Each lane belongs to one thread, which waits in it.
"""

import json
import logging
import os
import socket
import subprocess
import threading
from dataclasses import asdict
from pathlib import Path

from engine.sampling_params import Grammar
from workers.python_child import start_python

logger = logging.getLogger("oarlock.engine")

_MODULE = ("-m", "engine.structured_output.sandbox")
_ATTEMPTS = 2  # the process may have been lost for a reason that has nothing to do with this grammar


class ForgeLostError(Exception):
    """The process ended before it had answered, twice."""


class Forge:
    """`ask` tells what is wrong with a grammar."""

    def __init__(self, tokenizer_file: Path, num_lanes: int) -> None:
        self._tokenizer_file = tokenizer_file
        self._num_lanes = num_lanes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lanes: list[socket.socket] = []
        self._is_closed = False

    def ask(self, number: int, grammar: Grammar) -> str | None:
        """None when `grammar` compiles in time; else the reason why not. Raises `ForgeLostError`."""
        line = json.dumps(asdict(grammar)).encode() + b"\n"
        for _ in range(_ATTEMPTS):
            lane = self._lane(number)
            try:
                lane.sendall(line)
                answer = _read_line(lane)
            except OSError:
                answer = b""
            if answer:
                return json.loads(answer)["problem"]
            self._lost(lane)
        raise ForgeLostError

    def close(self) -> None:
        """The process reads the end of its lanes and leaves; a thread that waits in a lane does as well."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _lane(self, number: int) -> socket.socket:
        with self._lock:
            if self._is_closed:
                raise ForgeLostError
            if self._process is None:
                self._start()
            return self._lanes[number]

    def _start(self) -> None:
        pairs = [socket.socketpair() for _ in range(self._num_lanes)]
        self._lanes = [ours for ours, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        named = ["--tokenizer", str(self._tokenizer_file), "--parent", str(os.getpid())]
        self._process = start_python(
            [*_MODULE, *named, *(part for fd in fds for part in ("--fd", str(fd)))], pass_fds=fds
        )
        for _, theirs in pairs:
            theirs.close()
        logger.info("event=grammar_forge_started pid=%d", self._process.pid)

    def _lost(self, lane: socket.socket) -> None:
        with self._lock:
            if lane in self._lanes:  # the other lanes' threads find theirs closed and come here as well
                logger.warning("event=grammar_forge_lost")
                self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it, which closing would not
            lane.close()
        if process is not None:
            process.kill()
            process.wait()


def _read_line(lane: socket.socket) -> bytes:
    """One answer; empty when the lane has ended before it."""
    parts: list[bytes] = []
    while part := lane.recv(1 << 16):
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""
