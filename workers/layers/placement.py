"""The tensor-parallel rank, dtype and device of a layer's weights, passed to every layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of a layer are, and in which dtype."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor for weights."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
