"""Start and end of rank processes, which import torch at once and then wait for their arguments. Torch-free.

Light to import, so that it can be called before all else. Does not know the purpose of the processes.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from oarlock.base.python_child import start_python
from oarlock.workers.distributed.control_channel import Control

SERVES = "oarlock.workers.runner.worker_process"
# Iterations that a waiting OpenMP thread of a rank spins before it releases its core. They take a millisecond or two,
# which is longer than the time between two matmuls of a step. OpenMP's default is seven times as large. If other
# programs want the cores, a thread would then use up its share of them waiting for a thread that cannot run.
_SPINS = {"GOMP_SPINCOUNT": "40000"}
_OF_OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # a user who sets any of these has chosen
_KILL_S = 5.0  # time for the kernel to end a process; a process that waits for a dead network file system may never end


class RankProcess(NamedTuple):
    """A started process and our end of its control channel. It ends when either end of the channel is closed."""

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
    """Start the processes of up to `count` ranks, at most one per core, so that a wrong number does not start
    thousands."""
    return start_ranks(min(count, os.cpu_count() or 1))


def end_ranks(ranks: Iterable[RankProcess]) -> None:
    """Kill the processes, and close their channels."""
    for process, control in ranks:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        control.close()
