"""Profiler of one process of a server, for `benchmarks.token_path`. Python imports a module of this name at start.

In a process of `oarlock serve` that tokens pass through, it counts the calls of Python functions in the main thread,
from the first SIGUSR2 on. Each further one writes the counts to a file in the folder that `TOKEN_PROFILER_FOLDER`
names, and begins again.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_PROCESSES = {
    "oarlock": "frontend",
    "oarlock.engine.core": "engine",
    "oarlock.workers.runner.worker_process": "rank",
}


def count_calls(process: str, folder: Path) -> None:
    """Count this process's calls, as `process`, on SIGUSR2. Its id is in `folder` once it can be sent."""
    counts: Counter[CodeType] = Counter()
    num_written = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    def write(*_: Any) -> None:
        nonlocal num_written
        sys.setprofile(None)
        found = [(code.co_filename, code.co_firstlineno, code.co_qualname, calls) for code, calls in counts.items()]
        counts.clear()
        partial = folder / f"{process}.partial"
        partial.write_text(json.dumps(found))
        partial.rename(folder / f"{process}.{num_written}.json")
        num_written += 1
        sys.setprofile(count)

    signal.signal(signal.SIGUSR2, write)
    (folder / f"{process}.pid").write_text(str(os.getpid()))


if "TOKEN_PROFILER_FOLDER" in os.environ:
    words = sys.orig_argv
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if module in _PROCESSES:
        count_calls(_PROCESSES[module], Path(os.environ["TOKEN_PROFILER_FOLDER"]))
