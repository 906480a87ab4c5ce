"""Starts the reference of a verification, then its ranks, as processes, and follows them to their end.

Knows processes and channels. Knows neither tensors nor verdicts, and does not import torch.
"""

import json
import os
import select
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.shm_layout import total_bytes
from workers.distributed.shm_ring import ChannelClosedError, anonymous_memory
from workers.errors import StartupError
from workers.python_child import start_python

_COLLECTIVE_BUFFER_BYTES = 4 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What a rank inherits. Descriptors keep their numbers across the spawn."""

    rank: int
    parent_pid: int
    control_fd: int
    collective_memory_fd: int
    collective_bytes: int
    store_port: int
    store_listen_fd: int  # -1 for all ranks but 0
    folder: str
    config: str  # WorkerConfig as JSON

    def to_json(self) -> str:
        return json.dumps(asdict(self))


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
            f"transformers could not run this model ({_ending(status)}).",
            "Its own message stands above; if it was killed, the machine ran out of memory.",
            status if status > 0 else 4,
        )


def run_ranks(config: WorkerConfig, folder: Path, say: Say) -> None:
    """Our side: one process per rank, as many as serve."""
    processes, controls = _spawn(config, folder)
    try:
        _follow(processes, controls, say)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for control in controls:
            control.close()


def _spawn(config: WorkerConfig, folder: Path) -> tuple[list[subprocess.Popen[bytes]], list[Control]]:
    size = config.tensor_parallel_size
    memory = anonymous_memory(total_bytes(size, _COLLECTIVE_BUFFER_BYTES))
    listener = socket.create_server(("127.0.0.1", 0))
    processes, controls = [], []
    for rank in range(size):
        ours, theirs = Control.pair()
        controls.append(ours)
        fds = [memory, theirs.fileno(), *([listener.fileno()] if rank == 0 else [])]
        arguments = RankArguments(
            rank=rank,
            parent_pid=os.getpid(),
            control_fd=theirs.fileno(),
            collective_memory_fd=memory,
            collective_bytes=_COLLECTIVE_BUFFER_BYTES,
            store_port=listener.getsockname()[1],
            store_listen_fd=listener.fileno() if rank == 0 else -1,
            folder=str(folder),
            config=config.to_json(),
        )
        processes.append(
            start_python(
                ["-m", "workers.verify.rank", arguments.to_json()],
                pass_fds=fds,
                environment={"OMP_NUM_THREADS": str(config.num_threads)} if config.device == "cpu" else {},
            )
        )
        theirs.close()
    listener.close()
    os.close(memory)
    return processes, controls


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
                    f"rank {rank} ended before its work was done ({_ending(processes[rank].wait(10))}).",
                    "Its own message stands above; if it was killed, the machine ran out of memory.",
                    4,
                ) from None
            if message["kind"] == "failed":
                raise StartupError(message["cause"], message["fix"], int(message["exit_code"]))
            if message["kind"] == "done":
                del running[rank]
            elif rank == 0:
                say(f"our {len(controls)} rank(s): {message['text']}")


def _ending(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
