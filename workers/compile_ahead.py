"""Compiles the kernels of this machine's processor while the rest of a start goes on. Torch-free and light to import.

python -m workers.compile_ahead
"""

import subprocess
import threading

from workers.errors import StartupError
from workers.kernels.cpu import build, levels
from workers.python_child import start_python


def begin_compiling() -> None:
    """Start a process that compiles the kernels, unless they are there; ranks wait for it, by the lock of the cache.

    It goes on when this process ends, so that the next start finds them. It says nothing where they cannot be compiled:
    who needs them tries again, and reports the reason.
    """
    try:
        level = levels.chosen()
        if level is None or build.existing(level) is not None:
            return
    except (StartupError, build.KernelsUnavailable):
        return
    process = start_python(["-m", "workers.compile_ahead"], output=subprocess.DEVNULL)
    threading.Thread(target=process.wait, name="compiling", daemon=True).start()


def _compile() -> int:
    level = levels.chosen()
    try:
        if level is not None:
            build.compiled(level)
    except build.KernelsUnavailable:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_compile())
