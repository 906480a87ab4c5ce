"""Starts the processes of ranks, which import torch at once and then wait for their arguments. Torch-free.

Light to import, so that it can be called before all else. Does not know what the processes do.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.python_child import start_python

SERVES = "oarlock.workers.runner.worker_process"
# Turns that a thread of a rank waits for the others before it lets go of its core: a millisecond or two, more than the
# products of a step are apart. OpenMP's own number is seven times as large: beside programs that want the cores, a
# thread then spends its share of them waiting for one that cannot run.
_SPINS = {"GOMP_SPINCOUNT": "40000"}
_OF_OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # a user who sets one of these has chosen
_KILL_S = 5.0  # for the kernel to end a process; one that waits for a dead network file system may never end


class RankProcess(NamedTuple):
    """A started process and our end of its control channel. It ends when either end of the channel does."""

    process: subprocess.Popen[bytes]
    control: Control


def start_ranks(count: int, module: str = SERVES) -> list[RankProcess]:
    """Start `python -m MODULE PARENT_PID CONTROL_FD`, `count` times. A failure leaves no process behind."""
    ranks: list[RankProcess] = []
    waiting = {} if any(map(os.environ.get, _OF_OPENMP)) else _SPINS
    try:
        for _ in range(count):
            ours, theirs = Control.pair()
            fd = theirs.fileno()
            try:
                process = start_python(["-m", module, str(os.getpid()), str(fd)], pass_fds=[fd], environment=waiting)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            ranks.append(RankProcess(process, ours))
    except BaseException:
        end_ranks(ranks)
        raise
    return ranks


def start_ranks_ahead(count: int) -> list[RankProcess]:
    """Start the processes of up to `count` ranks, one for each core: a wrong number must not start thousands."""
    return start_ranks(min(count, os.cpu_count() or 1))


def end_ranks(ranks: Iterable[RankProcess]) -> None:
    """Kill the processes, and close their channels."""
    for process, control in ranks:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        control.close()
