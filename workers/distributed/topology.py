"""Stages and nodes of ranks, their shards of the vocabulary, and the addresses with which they join. Torch-free.

Ranks are numbered stage by stage. Nodes hold neighbouring ranks, each the same number:

    TP 2 x PP 2 on 2 nodes       rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 1
    TP 4 on 2 nodes              rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 0
"""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of one group of ranks, and values derived from them."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nnodes: int = 1

    @staticmethod
    def of(config: WorkerConfig) -> "Topology":
        return Topology(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes)

    def check(self) -> None:
        """Raise `StartupError` if ranks cannot be divided equally among nodes, or if a node would hold a whole stage
        together with part of another."""
        world, nodes, tp = self.world_size, self.nnodes, self.tensor_parallel_size
        sizes = f"{tp} tensor-parallel ranks x {self.pipeline_parallel_size} pipeline stages"
        if world % nodes:
            raise StartupError(
                f"--nnodes {nodes}: {sizes} cannot be divided equally among {nodes} nodes.",
                "Make --tensor-parallel-size times --pipeline-parallel-size a multiple of --nnodes.",
            )
        if tp % self.ranks_per_node and self.ranks_per_node % tp:
            raise StartupError(
                f"--nnodes {nodes}: with {sizes}, a node's {self.ranks_per_node} ranks would belong to two stages.",
                "Let each node hold whole stages, or each stage whole nodes.",
            )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    @property
    def output_rank(self) -> int:
        """The first rank of the last stage, which samples and returns the results."""
        return self.world_size - self.tensor_parallel_size

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Return the index of `rank` among the ranks of its node, which is also its device there."""
        return rank % self.ranks_per_node

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def tensor_rank(self, rank: int) -> int:
        """Return the index of `rank` among the ranks of its stage."""
        return rank % self.tensor_parallel_size

    def stage_ranks(self, stage: int) -> range:
        first = stage * self.tensor_parallel_size
        return range(first, first + self.tensor_parallel_size)

    def neighbours_on_node(self, rank: int) -> range:
        """Return the ranks of the same stage as `rank` on its node, including itself. They share memory."""
        node, stage = self.ranks_of(self.node_of(rank)), self.stage_ranks(self.stage_of(rank))
        return range(max(node.start, stage.start), min(node.stop, stage.stop))


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of the store of several hosts, which the first host or its launcher runs."""

    address: str  # IP address
    port: int
    prefix: str  # prefix of this group's keys


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Addresses, descriptors and sizes with which a rank finds the others.

    On one host nothing listens and nothing has a name on disk, unless torch's process groups are needed: gloo and NCCL
    open their own sockets. On several hosts ranks meet at the store, and listen on one interface.
    """

    rank: int  # index among all ranks of all hosts
    size: int  # number of all ranks
    memory_fd: int  # shared memory of all ranks of this node, across stages: `shm_layout.total_bytes`
    buffer_bytes: int  # size of each input buffer in that memory
    timeout_s: float  # limit of every wait for another rank
    shares_cores: bool  # there are fewer cores than ranks of this node
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    row_bytes: int = 0  # bytes of a hidden state that one stage sends to the next
    store_fd: int | None = None  # one host: memory in which torch's store can be kept
    store: StoreAddress | None = None  # several hosts
    interface: str | None = None  # this host's interface for gloo and NCCL; None: the loopback
    from_stage: dict[str, Any] | None = None  # `StageRing` from the previous stage, if that is on this host
    to_stage: dict[str, Any] | None = None  # `StageRing` to the next stage, if that is on this host

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> "RendezvousInfo":
        """Return the opposite of `asdict`."""
        info = RendezvousInfo(**fields)
        return info if fields["store"] is None else replace(info, store=StoreAddress(**fields["store"]))

    @property
    def topology(self) -> Topology:
        stages = self.pipeline_parallel_size
        return Topology(self.size // stages, stages, self.nnodes)


STATUS_BYTES = 64  # header of a message between stages: whether the step runs; 64 bytes keep the rows after it aligned


@dataclass(frozen=True, slots=True)
class StageRing:
    """One end of a ring between two ranks of neighbouring stages."""

    memory_fd: int
    wake_fd: int
    layout: dict[str, int]


# Number of slices of the vocabulary. Probabilities are added slice by slice, so that the bits of their sum do not
# depend on the number of ranks.
VOCAB_SLICES = 8  # also `kSlices` in kernels/cpu/csrc/sampling/logits_row.h


def vocab_slice(vocab_size: int, size: int) -> int:
    """Return the ids of one slice, which is a whole shard if `size` does not divide the number of slices."""
    return -(-vocab_size // (VOCAB_SLICES if VOCAB_SLICES % size == 0 else size))


def vocab_shard_size(vocab_size: int, size: int) -> int:
    """Return the ids of each rank's shard. The last shards may extend beyond the vocabulary."""
    if size == 1:
        return vocab_size
    return vocab_slice(vocab_size, size) * (VOCAB_SLICES // size if VOCAB_SLICES % size == 0 else 1)
