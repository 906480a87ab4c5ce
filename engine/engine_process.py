"""Start of the engine's process, with a socket to it. Light to import, so it can be started before all else.

The process starts the processes of its ranks. All of them import their libraries, which takes seconds, while their
parent does the same. Then the process waits for its configuration. A host that has only ranks runs no engine, but
`run_node` of `workers/node.py`.
"""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from oarlock.base.python_child import start_python
from oarlock.workers.compile_ahead import USUAL_TIME, begin_compiling

ENGINE_MODULE = ("-m", "oarlock.engine.core")
COMPILING = f"compiling kernels for this processor: only a first start does that, and it usually takes {USUAL_TIME}"


class EngineProcess:
    """A started process. The caller of `take` owns its socket and must end the process; before that, `discard` does."""

    def __init__(
        self,
        num_ranks: int,
        *,
        compiles: tuple[str | None, str] | None = None,
        command: Sequence[str] = ENGINE_MODULE,
    ) -> None:
        """`num_ranks`: the number that its configuration will contain. `compiles`: a model's directory and `dtype`
        option. If the model's CPU kernels must be compiled, begin with that, since it takes longest.

        The kernel ends the process together with the thread that started it. `command` is run by the interpreter,
        followed by three numbers: the socket's descriptor, the id of this process, and the number of ranks.
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
        """Return the process and our end of its socket. Allowed once."""
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
    """Make processes started inside ignore Ctrl-C: a terminal sends it to all its processes, but the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can; the engine ignores the signal as soon as it runs
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
