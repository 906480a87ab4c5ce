"""Starts the engine's process, with a socket to it. Light to import, so that it can be started before all else.

The process starts those of its ranks, and all of them import their libraries, which takes seconds, while its parent
does the same; then it waits for its configuration. A host that has only ranks runs no engine, but `run_node`.
"""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from oarlock.workers.compile_ahead import USUAL_TIME, begin_compiling
from oarlock.workers.node import check_network, run_node
from oarlock.workers.python_child import start_python

ENGINE_MODULE = ("-m", "oarlock.engine.core")
COMPILING = f"compiling kernels for this processor: only a first start does that, and it usually takes {USUAL_TIME}"


class EngineProcess:
    """A started process. The caller of `take` owns its socket and ends it; until then `discard` does."""

    def __init__(
        self,
        num_ranks: int,
        *,
        compiles: tuple[str | None, str] | None = None,
        command: Sequence[str] = ENGINE_MODULE,
    ) -> None:
        """`num_ranks`: those that its configuration will name. `compiles`: a model's directory and `dtype` option;
        where its kernels for CPUs must be compiled, begin with that: it takes longest.

        The kernel ends the process together with the thread that started it. `command` is what the interpreter runs,
        with three numbers added: its socket's, this process's, and that of the ranks.
        """
        ours, theirs = socket.socketpair()
        with theirs, _sigint_ignored():
            # Whether kernels are compiled meanwhile.
            self.is_compiling = compiles is not None and begin_compiling(*compiles)
            process = start_python(
                [*command, str(theirs.fileno()), str(os.getpid()), str(num_ranks)],
                pass_fds=[theirs.fileno()],
            )
        self._started: tuple[subprocess.Popen[bytes], socket.socket] | None = process, ours

    def take(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process and our end of its socket, once."""
        assert self._started is not None, "the process was taken or discarded"
        started, self._started = self._started, None
        return started

    def discard(self) -> None:
        """End the process, unless it was taken."""
        if self._started is not None:
            process, sock = self.take()
            sock.close()
            process.kill()
            process.wait()


@contextmanager
def _sigint_ignored() -> Generator[None]:
    """A process started meanwhile ignores Ctrl-C, which a terminal sends to all its processes: the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can; the engine ignores the signal as soon as it runs
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
