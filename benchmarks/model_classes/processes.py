"""Runs the judge of each class in a process of its own, with limits of time and memory: a crash is a row of the table.

Processes are forks of this one, which imports torch and transformers once and starts no thread of its own.
"""

import gc
import json
import os
import resource
import selectors
import signal
import time
import traceback
from collections.abc import Iterator, Sequence

from benchmarks.model_classes.outcome import Row

TIME_LIMIT_S = 120.0
MEMORY_LIMIT_BYTES = 4 << 30  # of a process, beyond files that it maps
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


def prepare() -> None:
    """Import what all processes need. Call it before anything else imports torch."""
    os.environ.update(_ENVIRONMENT)
    import torch

    torch.set_num_threads(1)
    from benchmarks.model_classes import judge  # noqa: F401


def judged(classes: Sequence[tuple[str, str]], workers: int) -> Iterator[Row]:
    """Yield the row of each class (name, model_type) as it is finished. `workers`: processes at the same time."""
    prepare()
    waiting = list(reversed(classes))
    running: list[_Child] = []
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    child = _Child(waiting.pop())
                    running.append(child)
                    selector.register(child.results, selectors.EVENT_READ, child)
                for key, _ in selector.select(timeout=1.0):
                    key.data.read()
                for child in [one for one in running if one.is_finished or one.is_late]:
                    selector.unregister(child.results)
                    running.remove(child)
                    yield child.row()
        finally:
            for child in running:
                child.row()


class _Child:
    """The process of one class. It writes its row as JSON."""

    def __init__(self, one: tuple[str, str]) -> None:
        self._one, self._received = one, b""
        self.is_finished = False
        self.results, theirs = os.pipe()
        self._started = time.monotonic()
        gc.freeze()
        self._pid = os.fork()
        if self._pid == 0:
            _main(one, theirs)
        os.close(theirs)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._started > TIME_LIMIT_S

    def read(self) -> None:
        """Take some of its row."""
        data = os.read(self.results, 1 << 16)
        self._received += data
        self.is_finished = not data

    def row(self) -> Row:
        """Return the row that the process wrote, or a row about its end; end the process if it still runs."""
        if not self.is_finished:
            os.kill(self._pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self.results)
        if not self.is_finished:
            return Row(*self._one, fault=f"it was not finished within {TIME_LIMIT_S:g} s")
        if status:
            return Row(*self._one, fault=f"its process ended with exit status {status}")
        return Row.decoded(json.loads(self._received))


def _main(one: tuple[str, str], results: int) -> None:
    """Judge one class, write its row to the file `results` and end the process."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if "MODEL_CLASSES_DEBUG" not in os.environ:
            os.dup2(nowhere, 1)  # classes' progress and warnings
            os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
        from benchmarks.model_classes.judge import judge
        from benchmarks.model_classes.tiny import ModelClass

        with os.fdopen(results, "w") as file:
            file.write(json.dumps(judge(ModelClass(*one)).encoded()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # without the parent's handlers
