"""Compile sandbox: a process that tries grammars first, and its client in the engine, which starts it when needed.

    python -m oarlock.engine.structured_output.sandbox --tokenizer FILE --parent PID --fd N [--fd N …]

A grammar that crashes, hangs or takes too much memory cannot harm the engine. Each descriptor is a connection: it
receives one grammar per line as JSON and sends one `Trial` per line as JSON, one after the other, preceded by spaces as
signs of life. Connections are served in parallel, by processes that share the memory of the tokenizer. Each trial is a
fork with limits on time, memory and stack; a grammar that passes is then compiled by the engine, whose limits are
wider. The client starts the process again if it was lost or gives no sign of life, and does not know how its results
are used.
"""

import argparse
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from oarlock.base.process_memory import memory_use
from oarlock.base.python_child import die_with_parent, leave_signals_to_parent, start_python
from oarlock.engine.structured_output.compiler import Compiler, GrammarError
from oarlock.engine.structured_output.grammar_memory import resident_bytes
from oarlock.engine.types import Grammar

logger = logging.getLogger("oarlock.engine")

_MODULE = ("-m", "oarlock.engine.structured_output.sandbox")
_ATTEMPTS = 2  # the process may have been lost for a reason that has nothing to do with this grammar
DEADLINE_S = 1.0  # CPU time of one trial
_PATIENCE_S = 10.0  # clock time of one trial, during which other programs may use the CPU
_BEAT_S = 1.0  # time between signs of life during a trial
_SILENCE_S = 8.0  # time without a sign of life after which the process counts as hung and is started again
_START_S = 30.0  # likewise, until it has read the tokenizer
_MAX_MEMORY_BYTES = 256 << 20  # address space in addition to the tokenizer's
_STACK_BYTES = 2 << 20  # a quarter of the stack of the engine's threads
_NICENESS = 5  # running requests come first

TOO_LONG = f"it takes longer than {DEADLINE_S:g} s to compile; make it smaller"
TOO_MUCH = "compiling it takes more memory or nesting than the server allows; make it smaller or flatter"


class Trial(NamedTuple):
    """Result of a trial."""

    problem: str | None  # None: the grammar compiles in time
    num_bytes: int = 0  # memory of the compiled grammar
    is_lost: bool = False  # the trial did not run, through no fault of the grammar


# -- the process


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="oarlock.engine.structured_output.sandbox", description="Internal: started by the engine."
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fd", type=int, action="append", required=True)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    leave_signals_to_parent()
    os.nice(_NICENESS)
    compiler = Compiler(arguments.tokenizer)
    connections = [socket.socket(fileno=fd) for fd in arguments.fd]
    own = connections[0]
    for connection in connections[1:]:
        parent = os.getpid()
        if os.fork() == 0:
            die_with_parent(parent)
            own = connection
            break
    for connection in connections:
        if connection is not own:
            connection.close()
    _serve(own, compiler)
    return 0


def _serve(connection: socket.socket, compiler: Compiler) -> None:
    """Check grammars until the engine closes the connection."""

    def beat() -> None:
        connection.sendall(b" ")

    # The engine may close the connection before it has read the last sign of life.
    with connection, connection.makefile("r", encoding="utf-8") as lines, suppress(ConnectionError):
        beat()
        for line in lines:
            trial = _check(compiler, Grammar(**json.loads(line)), beat)
            connection.sendall(json.dumps(trial._asdict()).encode() + b"\n")


def _check(compiler: Compiler, grammar: Grammar, beat: Callable[[], None]) -> Trial:
    """Try `grammar`, twice if it took too long or did not run.

    If a machine is suspended for a moment, that time counts as CPU time of the running process.
    """
    trial = _try(compiler, grammar, beat)
    return _try(compiler, grammar, beat) if trial.problem == TOO_LONG or trial.is_lost else trial


def _try(compiler: Compiler, grammar: Grammar, beat: Callable[[], None]) -> Trial:
    """Try `grammar` in a forked process."""
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(read)
        _attempt(compiler, grammar, write)
    os.close(write)
    try:
        response = _read_until(read, time.monotonic() + _PATIENCE_S, beat)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)  # it has ended, or it is too late
        _, status, used = os.wait4(child, 0)
    if response is None and used.ru_utime + used.ru_stime < DEADLINE_S / 2:
        return Trial(None, 0, is_lost=True)  # it was stopped, or other programs used the CPU
    if response is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        return Trial(TOO_LONG)
    return Trial(**json.loads(response)) if response else Trial(TOO_MUCH)


def _read_until(fd: int, deadline: float, beat: Callable[[], None]) -> bytes | None:
    """Read until the other end is closed, or return None after `deadline`. Calls `beat` while it waits."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(min(left, _BEAT_S) * 1000):
            beat()
        else:
            part = os.read(fd, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _attempt(compiler: Compiler, grammar: Grammar, write: int) -> None:
    """Compile in the forked process with narrow limits, write the result to `write`, and end."""

    def compile_it() -> None:
        num_bytes, problem = resident_bytes(), None
        try:
            compiled = compiler.compile(grammar)
            num_bytes = max(0, resident_bytes() - num_bytes)
            del compiled
        except GrammarError as error:
            problem = str(error)
        os.write(write, json.dumps(Trial(problem, num_bytes)._asdict()).encode())

    try:
        if sys.platform == "linux":
            size = memory_use().mapped
            resource.setrlimit(resource.RLIMIT_AS, (size + _MAX_MEMORY_BYTES, size + _MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library that aborts writes to stderr
        threading.stack_size(_STACK_BYTES)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)  # afterwards this process is killed
        worker = threading.Thread(target=compile_it)
        worker.start()
        worker.join()
    finally:
        os._exit(0)


# -- the client in the engine


class SandboxLostError(Exception):
    """The process ended or hung before it had responded, twice."""


class CompileSandbox:
    """Tries grammars in another process. Each connection belongs to one thread, which waits for the result."""

    def __init__(self, tokenizer_file: Path, num_connections: int) -> None:
        self._tokenizer_file = tokenizer_file
        self._num_connections = num_connections
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connections: list[socket.socket] = []
        self._is_closed = False

    def check(self, number: int, grammar: Grammar) -> Trial:
        """Try to compile `grammar`. Raises `SandboxLostError`.

        `number`: the calling thread's connection.
        """
        line = json.dumps(asdict(grammar)).encode() + b"\n"
        for _ in range(_ATTEMPTS):
            connection = self._connection(number)
            try:
                connection.sendall(line)
                response = _read_line(connection)
            except OSError:
                response = b""
            trial = Trial(**json.loads(response)) if response else None
            if trial is not None and not trial.is_lost:
                return trial
            self._lost(connection)
        raise SandboxLostError

    def close(self) -> None:
        """End the process; threads that wait for a result get `SandboxLostError`."""
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
        for ours, theirs in pairs:
            ours.settimeout(_START_S)
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
    """Read one result; empty if the connection has ended before it.

    Raises `TimeoutError`, an `OSError`, if there is no sign of life.
    """
    parts: list[bytes] = []
    while part := connection.recv(1 << 16):
        connection.settimeout(_SILENCE_S)
        parts.append(part)
        if part.endswith(b"\n"):
            return b"".join(parts)
    return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
