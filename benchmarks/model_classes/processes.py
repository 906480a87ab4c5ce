"""Runs the judge of each class in a process of its own, with limits of time and memory: a crash is a row of the table.

torch and transformers are imported once, by the server that forks these processes.
"""

import contextlib
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait

from benchmarks.model_classes.outcome import Row

TIME_LIMIT_S = 120.0
MEMORY_LIMIT_BYTES = 4 << 30  # of a process, beyond the libraries that all share
_PRELOADED = ["benchmarks.model_classes.judge", "oarlock.workers.transformers_backend.inspection"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def judged(classes: Sequence[tuple[str, str]], workers: int) -> Iterator[Row]:
    """Yield the row of each class (name, model_type) as it is finished. `workers`: processes at the same time."""
    os.environ.update(_ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    waiting = list(reversed(classes))
    running: dict[Connection, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                child = _Child(context, waiting.pop())
                running[child.results] = child
            ready = wait(list(running), timeout=1.0)
            for results in ready:
                yield running.pop(results).row()  # type: ignore[index]
            for results, child in list(running.items()):
                if child.is_late:
                    yield running.pop(results).stopped()
    finally:
        for child in running.values():
            child.stopped()


class _Child:
    """The process of one class."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, one: tuple[str, str]) -> None:
        self._one = one
        self.results, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_main, args=(one, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._started = time.monotonic()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._started > TIME_LIMIT_S

    def row(self) -> Row:
        """Return the row that the process sent, or one that says that it crashed."""
        try:
            row = Row.decoded(self.results.recv())
        except EOFError:
            self._process.join()
            row = Row(*self._one, fault=f"its process ended with exit status {self._process.exitcode}")
        self._process.join()
        return row

    def stopped(self) -> Row:
        """End the process, and return a row that says why."""
        self._process.kill()
        self._process.join()
        return Row(*self._one, fault=f"it was not finished within {TIME_LIMIT_S:g} s")


def _main(one: tuple[str, str], results: Connection) -> None:
    """Judge one class and send its row."""
    from benchmarks.model_classes.judge import judge
    from benchmarks.model_classes.tiny import ModelClass

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # classes' warnings
        try:
            row = judge(ModelClass(*one))
        except MemoryError:
            row = Row(*one, fault=f"it needs more than {MEMORY_LIMIT_BYTES >> 30} GiB")
    results.send(row.encoded())
    sys.stdout.flush()
