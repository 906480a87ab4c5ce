"""Gives each rank process its arguments, with collective memory and rendezvous, for serving and `verify`.

Torch-free. Does not know what the processes do.
"""

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.rendezvous import LOOPBACK, RendezvousInfo
from workers.distributed.shm_layout import Flags, total_bytes
from workers.distributed.shm_ring import ChannelClosedError, anonymous_memory
from workers.rank_processes import RankProcess, end_ranks, start_ranks
from workers.worker.cpu_affinity import ranks_share_cores

_COLLECTIVE_BUFFER_BYTES = 4 << 20  # longer tensors go through in pieces
_COLLECTIVE_TIMEOUT_S = 3600.0  # at least; the parent ends a rank that waits long before


@dataclass(frozen=True, slots=True)
class RankArguments:
    """The first message to a rank process. The descriptors that it names come with it."""

    rendezvous: RendezvousInfo
    config: WorkerConfig
    extra: dict[str, Any] = field(default_factory=dict)  # what this kind of rank process needs besides

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def local_rank(self) -> int:
        """Its place among the ranks of this host."""
        return self.rendezvous.topology.local_rank(self.rank)

    @staticmethod
    def receive(control: Control) -> "RankArguments":
        """Blocks. Raises `ChannelClosedError` when the parent has ended."""
        fields = control.recv()
        return RankArguments(RendezvousInfo(**fields["rendezvous"]), WorkerConfig(**fields["config"]), fields["extra"])


class Store(NamedTuple):
    """Where rank 0's store is, and what ranks prove to each other with."""

    address: str = LOOPBACK
    port: int = 0
    token: str = ""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Which ranks are started here, and where they find rank 0."""

    node: int = 0
    address: str = LOOPBACK  # of this host, a number: what its ranks listen on
    store: Store | None = None  # None: rank 0 is here


THE_ONLY_NODE = NodePlace()


class SpawnedRanks(NamedTuple):
    """All in rank order. The caller ends the processes and closes the rest, by `end` or otherwise."""

    processes: list[subprocess.Popen[bytes]]
    controls: list[Control]
    collectives: Flags
    store: Store = Store()  # what the other nodes must know

    def end(self) -> None:
        """Kill the processes, and close everything."""
        end_ranks(map(RankProcess, self.processes, self.controls))
        self.collectives.close()


def spawn_ranks(
    module: str,
    config: WorkerConfig,
    extras: Sequence[dict[str, Any]],
    ahead: Sequence[RankProcess] = (),
    place: NodePlace = THE_ONLY_NODE,
) -> SpawnedRanks:
    """One process for each rank of `config` on this host, with its arguments. `extras`: for each rank, its
    `RankArguments.extra`.

    `ahead`: processes that were started before and run `module`; this starts the others. A failure ends them all.
    """
    size = config.ranks_per_node
    assert len(ahead) <= size == len(extras)
    ranks = list(ahead)
    memory_fd = anonymous_memory(total_bytes(size, _COLLECTIVE_BUFFER_BYTES))
    try:
        ranks += start_ranks(size - len(ahead), module)
        with contextlib.ExitStack() as stack:
            listen_fd, store = None, place.store
            if store is None:
                family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
                listener = stack.enter_context(socket.create_server((place.address, 0), family=family))
                listen_fd = listener.fileno()
                store = Store(place.address, listener.getsockname()[1], secrets.token_hex(16))
            for number, extra in enumerate(extras):
                rank = place.node * size + number
                rendezvous = RendezvousInfo(
                    rank=rank,
                    size=size * config.nnodes,
                    port=store.port,
                    listen_fd=listen_fd if rank == 0 else None,
                    memory_fd=memory_fd,
                    buffer_bytes=_COLLECTIVE_BUFFER_BYTES,
                    # Longer than the parent waits: it sees all ranks and can name the one that hangs.
                    timeout_s=max(config.step_timeout_s, _COLLECTIVE_TIMEOUT_S),
                    shares_cores=ranks_share_cores(config),
                    pipeline_parallel_size=config.pipeline_parallel_size,
                    nnodes=config.nnodes,
                    address=store.address,
                    local_address=place.address,
                    token=store.token,
                )
                with contextlib.suppress(ChannelClosedError):  # it has ended: reading its messages shows it
                    ranks[number].control.send("arguments", **asdict(RankArguments(rendezvous, config, extra)))
        collectives = Flags(memory_fd, size)
    except BaseException:
        end_ranks(ranks)
        raise
    finally:
        os.close(memory_fd)
    return SpawnedRanks([rank.process for rank in ranks], [rank.control for rank in ranks], collectives, store)


def describe_exit(status: int) -> str:
    """The end of a process in words, from its `returncode`."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
