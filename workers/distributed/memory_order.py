"""The order in which one process's stores to shared memory become visible to another.

x86 keeps the order of the program. ARM and others may let a later store overtake an earlier access, so what says
"finished" could arrive before that to which it refers. Whoever wakes a reader through a pipe needs no more than that:
writing to and reading from one pipe takes the same lock of the kernel. `fence` is for counters that are only looked at.
"""

import platform
import threading

STORES_KEEP_ORDER = platform.machine() in ("x86_64", "AMD64")

_lock = threading.Lock()


def fence() -> None:
    """No access after it is visible before any access ahead of it, on every processor.

    Releasing a lock waits for what stands before, taking it holds back what follows; a release and a taking of one lock
    keep their order. So two rounds make a full barrier, for want of an instruction that Python could name.
    """
    with _lock:
        pass
    with _lock:
        pass
