"""Ends a process together with the one that started it, by the kernel's parent-death signal (Linux)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send signal `number` to this process when its parent ends. Does nothing on other systems.

    The signal also comes when the *thread* that started this process ends: that thread must stay alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
