"""Addresses and memory with which a rank joins the groups of all ranks, those of other hosts included. Torch-free."""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.workers.distributed.topology import Topology


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The store of several hosts, which the first host or its launcher keeps."""

    address: str  # a number
    port: int
    prefix: str  # of this group's keys


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Addresses, descriptors and sizes with which a rank finds the others.

    On one host nothing listens and nothing has a name on disk, but where torch's process groups are needed: gloo and
    NCCL have sockets of their own. On several hosts ranks meet at the store, and listen on one interface.
    """

    rank: int  # among all ranks of all hosts
    size: int  # all ranks
    memory_fd: int  # shared memory of all ranks of this node, those of several stages too: `shm_layout.total_bytes`
    buffer_bytes: int  # of each input buffer in that memory
    timeout_s: float  # of every wait for another rank
    shares_cores: bool  # there are fewer cores than ranks of this node
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    row_bytes: int = 0  # of a hidden state that one stage sends to the next
    store_fd: int | None = None  # one host: memory in which torch's store can be kept
    store: StoreAddress | None = None  # several hosts
    interface: str | None = None  # of this host, for gloo and NCCL; None: the loopback's
    from_stage: dict[str, Any] | None = None  # ring from the stage before, where that is on this host: `StageRing`
    to_stage: dict[str, Any] | None = None  # ring to the stage after, likewise

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> "RendezvousInfo":
        """The opposite of `asdict`."""
        info = RendezvousInfo(**fields)
        return info if fields["store"] is None else replace(info, store=StoreAddress(**fields["store"]))

    @property
    def topology(self) -> Topology:
        stages = self.pipeline_parallel_size
        return Topology(self.size // stages, stages, self.nnodes)


MARK_BYTES = 64  # ahead of the rows of a message between stages: whether the step runs; so many keep the rows aligned


@dataclass(frozen=True, slots=True)
class StageRing:
    """One end of a ring between two ranks of neighbouring stages."""

    memory_fd: int
    wake_fd: int
    layout: dict[str, int]
