"""Starts the reference of a verification, then its ranks, as processes, and follows them to their end.

Knows processes and channels. Knows neither tensors nor verdicts, and does not import torch.
"""

import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.shm_ring import ChannelClosedError
from workers.errors import StartupError
from workers.python_child import start_python
from workers.worker.spawn_ranks import RankExtras, describe_exit, spawn_ranks

Say = Callable[[str], None]


def run_reference(folder: Path) -> None:
    """transformers' side, in a process whose memory is given back before our ranks start."""
    with start_python(["-m", "workers.verify.reference", str(folder), str(os.getpid())]) as process:
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if status:
        raise StartupError(
            f"transformers could not run this model ({describe_exit(status)}).",
            "Its own message stands above; if it was killed, the machine ran out of memory.",
            status if status > 0 else 4,
        )


def run_ranks(config: WorkerConfig, folder: Path, say: Say) -> None:
    """Our side: one process per rank, as many as serve."""
    extras = [RankExtras({"folder": str(folder)})] * config.tensor_parallel_size
    processes, controls, collectives = spawn_ranks("workers.verify.rank", config, extras)
    try:
        _follow(processes, controls, say)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for control in controls:
            control.close()
        collectives.close()


def _follow(processes: list[subprocess.Popen[bytes]], controls: list[Control], say: Say) -> None:
    """Until every rank is done; the first that fails ends all."""
    running = dict(enumerate(controls))
    while running:
        pending = [control for control in running.values() if control.has_pending]
        for control in pending or select.select(list(running.values()), [], [])[0]:
            rank = controls.index(control)
            try:
                message = control.recv()
            except ChannelClosedError:
                raise StartupError(
                    f"rank {rank} ended before its work was done ({describe_exit(processes[rank].wait(10))}).",
                    "Its own message stands above; if it was killed, the machine ran out of memory.",
                    4,
                ) from None
            if message["kind"] == "failed":
                raise StartupError(message["cause"], message["fix"], int(message["exit_code"]))
            if message["kind"] == "done":
                del running[rank]
            elif rank == 0:
                say(f"our {len(controls)} rank(s): {message['text']}")
