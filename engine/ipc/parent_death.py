"""How a process of the engine ends with the one that started it. Knows the kernel's one call for it, and no pipes."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send `number` to this process when its parent ends; pipes say the same where it has no such call.

    It also fires when the *thread* that started this process ends: such a thread must stay.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the call above
        os._exit(0)
