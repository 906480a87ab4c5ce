"""Compilation of this processor's kernels in parallel with the rest of a start. Torch-free, light to import.

python -m oarlock.workers.compile_ahead ELEMENT_TYPE
"""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.json_files import read_table
from oarlock.base.python_child import start_python
from oarlock.workers.kernels.cpu import build
from oarlock.workers.platform.dtypes import ITEM_BYTES


def begin_compiling(model: str | None, dtype: str) -> bool:
    """Start a process that compiles the kernels for a model's element type, unless they exist.

    Return whether it was started.

    `model` and `dtype` as for `likely_element_type`. Ranks wait for the process, by the lock of the cache.

    The process continues after this one has ended, so that the next start finds the kernels. It prints nothing if
    compiling fails: a rank that needs the kernels tries again, and reports the reason.
    """
    try:
        level, element = build.chosen(), likely_element_type(model, dtype)
        if level is None or build.existing(build.for_type(level, element)) is not None:
            return False
    except (StartupError, build.KernelsUnavailable):
        return False
    process = start_python(["-m", "oarlock.workers.compile_ahead", element], output=subprocess.DEVNULL)
    threading.Thread(target=process.wait, name="compiling", daemon=True).start()
    return True


USUAL_TIME = build.USUAL_TIME  # phrase for the usual duration of a compilation


class CompilationWatch:
    """Progress of compiling one model's kernels, in whichever process."""

    def __init__(self, model: str, dtype: str) -> None:
        """Find the lock files of the model's kernels. `model` and `dtype` as for `likely_element_type`."""
        self._files: list[Path] = []
        try:
            level = build.chosen()
            if level is not None:
                levels = (build.of_one_type(level, likely_element_type(model, dtype)), level)
                self._files = [build.lock_file(one) for one in levels]
        except (StartupError, build.KernelsUnavailable):
            pass  # nothing can be compiled: the ranks report the reason

    def read(self) -> tuple[float, str] | None:
        """Return the fraction that is done and a description, or None if nothing is being compiled."""
        for file in self._files:
            if (found := build.read_compilation(file)) is not None:
                seconds = max(0.0, time.time() - found.started_at)
                text = f"{found.done} of {found.total} parts, {seconds:.0f} s; only a first start, {build.USUAL_TIME}"
                return found.fraction, text
        return None


def likely_element_type(model: str | None, dtype: str) -> str:
    """Return the element type in which `model`, a directory, will be served: `dtype`, or if that is "auto" the model's
    own.

    A guess if the model is missing or does not declare its dtype. A wrong guess only costs time.
    """
    if dtype != "auto":
        return dtype
    try:
        config = read_table(Path(model or "") / "config.json")
        declared = config.get("dtype") or config.get("torch_dtype")
    except StartupError:  # loading the model will report the reason
        declared = None
    return declared if isinstance(declared, str) and declared in ITEM_BYTES else "bfloat16"


def _compile(element: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the compilers, too
    level = build.chosen()
    try:
        if level is not None:
            build.compiled(build.for_type(level, element))
    except build.KernelsUnavailable:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_compile(sys.argv[1]))
