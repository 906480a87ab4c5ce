"""Places of ranks, their shares of the vocabulary, and the addresses with which they join. Torch-free.

Ranks are numbered stage by stage, and nodes hold neighbouring ranks, equally many each:

    TP 2 x PP 2 on 2 nodes       rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 1
    TP 4 on 2 nodes              rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 0
"""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import StartupError


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of one group of ranks, and what follows from them."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nnodes: int = 1

    @staticmethod
    def of(config: WorkerConfig) -> "Topology":
        return Topology(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes)

    def check(self) -> None:
        """Raises `StartupError` when ranks cannot be dealt to nodes equally, or a stage would share a node with part of
        another."""
        world, nodes, tp = self.world_size, self.nnodes, self.tensor_parallel_size
        sizes = f"{tp} tensor-parallel ranks x {self.pipeline_parallel_size} pipeline stages"
        if world % nodes:
            raise StartupError(
                f"--nnodes {nodes}: {sizes} cannot be dealt to {nodes} nodes equally.",
                "Make --tensor-parallel-size times --pipeline-parallel-size a multiple of --nnodes.",
            )
        if tp % self.ranks_per_node and self.ranks_per_node % tp:
            raise StartupError(
                f"--nnodes {nodes}: with {sizes}, a node's {self.ranks_per_node} ranks would be parts of two stages.",
                "Let each node hold whole stages, or each stage whole nodes.",
            )

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    @property
    def answering_rank(self) -> int:
        """The first rank of the last stage, which samples and returns the answers."""
        return self.world_size - self.tensor_parallel_size

    def ranks_of(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        """Place of `rank` among the ranks of its node, which is also its device there."""
        return rank % self.ranks_per_node

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def tensor_rank(self, rank: int) -> int:
        """Place of `rank` among the ranks of its stage."""
        return rank % self.tensor_parallel_size

    def stage_ranks(self, stage: int) -> range:
        first = stage * self.tensor_parallel_size
        return range(first, first + self.tensor_parallel_size)

    def neighbours_on_node(self, rank: int) -> range:
        """Ranks of the same stage as `rank` on its node, itself among them: they share memory."""
        node, stage = self.ranks_of(self.node_of(rank)), self.stage_ranks(self.stage_of(rank))
        return range(max(node.start, stage.start), min(node.stop, stage.stop))


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


# Slices of the vocabulary, by which probabilities are added up: their bits do not depend on the number of ranks.
VOCAB_SLICES = 8  # also `kSlices` in kernels/cpu/csrc/sampling/logits_row.h


def vocab_slice(vocab_size: int, size: int) -> int:
    """Ids of one slice: of a whole shard where `size` ranks cannot have the same number of slices."""
    return -(-vocab_size // (VOCAB_SLICES if VOCAB_SLICES % size == 0 else size))


def vocab_shard_size(vocab_size: int, size: int) -> int:
    """Ids of each rank's shard; the last ones may be beyond the vocabulary."""
    if size == 1:
        return vocab_size
    return vocab_slice(vocab_size, size) * (VOCAB_SLICES // size if VOCAB_SLICES % size == 0 else 1)
