"""The tensor-parallel rank, dtype and device of a layer's weights, passed to every layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel
from workers.platform.huge_pages import StagingMemory


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of a layer are, and in which dtype."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    staging: StagingMemory = field(default_factory=StagingMemory)

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor for weights, which may be kept or packed and dropped."""
        if self.device.type == "cpu":
            return self.staging.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)
