"""The order in which one process's stores to shared memory become visible to another.

x86 keeps program order. ARM and others may reorder a later store before an earlier access, so that a counter could show
a message as finished before its slot was read. A writer that wakes its reader through a pipe needs no fence: writing to
and reading from a pipe take the same lock in the kernel. `fence` is for counters that are polled.
"""

import platform
import threading

STORES_KEEP_ORDER = platform.machine() in ("x86_64", "AMD64")

_lock = threading.Lock()


def fence() -> None:
    """A full memory barrier: no access after it is visible before any access ahead of it, on every processor.

    Python has no instruction for it. Releasing a lock keeps earlier accesses before it, acquiring one keeps later ones
    after it, and a release and an acquire of the same lock keep their order; so two rounds make a full barrier.
    """
    with _lock:
        pass
    with _lock:
        pass
