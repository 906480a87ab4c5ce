"""Places of ranks: their nodes, pipeline stages and places in tensor-parallel groups. Torch-free.

Ranks are numbered stage by stage, and nodes hold neighbouring ranks, equally many each:

    TP 2 x PP 2 on 2 nodes       rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 1
    TP 4 on 2 nodes              rank 0, 1: node 0, stage 0      rank 2, 3: node 1, stage 0
"""

from dataclasses import dataclass

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
