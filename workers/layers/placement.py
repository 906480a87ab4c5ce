"""The tensor-parallel rank, dtype, device and form of a layer's weights, passed to every layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel
from workers.layers.quantization.method import LinearWeight
from workers.layers.quantization.registry import NONE, Quantization
from workers.layers.quantization.shard import WeightShard
from workers.platform.huge_pages import StagingMemory
from workers.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of a layer are, in which dtype, and in which form those of products are."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = NONE
    slices: int = 1  # of inputs that are cut among ranks, over all ranks (`slices_for`)
    staging: StagingMemory = field(default_factory=StagingMemory)

    @property
    def local_slices(self) -> int:
        """Those of one rank. With a number of ranks that does not divide them, a rank's inputs are one slice."""
        return self.slices // self.tp.size if self.slices % self.tp.size == 0 else 1

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor for weights, which may be kept or packed and dropped."""
        if self.device.type == "cpu":
            return self.staging.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def load(self, shard: WeightShard, weights: WeightSource) -> LinearWeight:
        """One rank's weight of a product."""
        return self.quantization.method().load(shard, weights, self.empty)

    def weight_bytes(self, shard: WeightShard, bias: bool) -> int:
        """Bytes of what `load` gives, and of its bias."""
        item = self.dtype.itemsize
        return self.quantization.weight_bytes(shard.rows, shard.local_inputs, item) + bias * shard.rows * item
