"""Starts one process per rank with its control socket, collective memory and rendezvous, for serving and `verify`.

Torch-free. Does not know what the processes do.
"""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_layout import Flags, total_bytes
from workers.distributed.shm_ring import anonymous_memory
from workers.python_child import start_python
from workers.worker.cpu_affinity import ranks_share_cores

_COLLECTIVE_BUFFER_BYTES = 4 << 20  # longer tensors go through in pieces
_KILL_S = 5.0  # for the kernel to end a process
_COLLECTIVE_TIMEOUT_S = 3600.0  # at least; the parent ends a rank that waits long before


@dataclass(frozen=True, slots=True)
class RankArguments:
    """The one argument of a rank process, as JSON. Descriptors keep their numbers across the spawn."""

    parent_pid: int
    control_fd: int
    rendezvous: RendezvousInfo
    config: WorkerConfig
    extra: dict[str, Any] = field(default_factory=dict)  # what this kind of rank process needs besides

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankArguments":
        fields = json.loads(text)
        rendezvous, config = RendezvousInfo(**fields.pop("rendezvous")), WorkerConfig(**fields.pop("config"))
        return RankArguments(rendezvous=rendezvous, config=config, **fields)


class RankExtras(NamedTuple):
    """What one rank gets beyond what every rank process needs."""

    arguments: dict[str, Any]  # JSON; becomes `RankArguments.extra`
    fds: tuple[int, ...] = ()  # inherited; they stay open here


class SpawnedRanks(NamedTuple):
    """All in rank order. The caller ends the processes and closes the rest."""

    processes: list[subprocess.Popen[bytes]]
    controls: list[Control]
    collectives: Flags


def spawn_ranks(module: str, config: WorkerConfig, extras: Sequence[RankExtras]) -> SpawnedRanks:
    """Start `python -m MODULE ARGUMENTS` for each rank of `config`; `extras` has one entry per rank.

    A failure leaves no process behind.
    """
    size = config.tensor_parallel_size
    # Read by torch when it is imported.
    threads = {"OMP_NUM_THREADS": str(config.num_threads)} if config.device == "cpu" and config.num_threads else {}
    shares_cores = ranks_share_cores(config)
    memory_fd = anonymous_memory(total_bytes(size, _COLLECTIVE_BUFFER_BYTES))
    ranks = SpawnedRanks([], [], Flags(memory_fd, size))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank, extra in enumerate(extras):
                ours, theirs = Control.pair()
                ranks.controls.append(ours)
                with contextlib.closing(theirs):
                    rendezvous = RendezvousInfo(
                        rank=rank,
                        size=size,
                        port=listener.getsockname()[1],
                        listen_fd=listener.fileno() if rank == 0 else None,
                        memory_fd=memory_fd,
                        buffer_bytes=_COLLECTIVE_BUFFER_BYTES,
                        # Longer than the parent waits: it sees all ranks and can name the one that hangs.
                        timeout_s=max(config.step_timeout_s, _COLLECTIVE_TIMEOUT_S),
                        shares_cores=shares_cores,
                    )
                    arguments = RankArguments(os.getpid(), theirs.fileno(), rendezvous, config, extra.arguments)
                    fds = [memory_fd, theirs.fileno(), *extra.fds]
                    if rank == 0:
                        fds.append(listener.fileno())
                    command = ["-m", module, arguments.to_json()]
                    ranks.processes.append(start_python(command, pass_fds=fds, environment=threads))
    except BaseException:
        for process in ranks.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
        for control in ranks.controls:
            control.close()
        ranks.collectives.close()
        raise
    finally:
        os.close(memory_fd)
    return ranks


def describe_exit(status: int) -> str:
    """The end of a process in words, from its `returncode`."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
