"""Child processes: engines with their ranks, and the program of a command, such as `oarlock verify`.

Engines and ranks are started first, because importing their libraries takes seconds. A program never outlives its
command. Both share a terminal: only the command handles Ctrl-C, SIGTERM and a closed terminal. It asks the child to end
and waits for it.
"""

import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType

from oarlock.base.python_child import start_python
from oarlock.engine.engine_process import COMPILING, EngineProcess
from oarlock.server.config.settings import Settings
from oarlock.workers.compile_ahead import USUAL_TIME

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_program(module: str, arguments: Sequence[str]) -> int:
    """Run `python -m MODULE --parent PID ARGUMENTS`. Returns its status, or 128 + the signal that ended it or us.

    The first signal is passed on as SIGTERM, so that the child can clean up; a second one kills it.
    """
    with signals_handled((signal.SIGINT, signal.SIGHUP), signal.SIG_IGN):  # inherited by the child: its parent decides
        child = start_python(["-m", module, f"--parent={os.getpid()}", *arguments], stdin=None)
    stopped_by: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGKILL if stopped_by else signal.SIGTERM)
        stopped_by.append(number)

    with signals_handled([number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN], stop):
        status = child.wait()
    if stopped_by:
        return 128 + stopped_by[0]
    return status if status >= 0 else 128 - status


@contextmanager
def signals_handled(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], object] | int
) -> Generator[None]:
    """Use `handler` for these signals within the context, and restore their handlers afterwards."""
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def engine_processes(settings: Settings) -> list[EngineProcess]:
    """Start one process for each replica, with the ranks of this host. They share one compilation of the CPU
    kernels."""
    compiles = None if settings.device == "cuda" else (settings.model, settings.dtype)
    num_ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size // settings.nnodes
    return [
        EngineProcess(num_ranks, compiles=None if number else compiles) for number in range(settings.data_parallel_size)
    ]


def announce_compiling(settings: Settings, processes: Sequence[EngineProcess]) -> None:
    """Print at once that kernels are compiled, if they are: the progress of the start is shown seconds later."""
    if not any(process.is_compiling for process in processes):
        return
    if settings.log_format == "json":
        from oarlock.server.observability import logs

        logs.configure(settings.log_level, settings.log_format)
        logs.logger("start").info(logs.event("compiling_kernels", usual_time=USUAL_TIME))
    else:
        sys.stderr.write(f"{COMPILING}\n")
        sys.stderr.flush()
