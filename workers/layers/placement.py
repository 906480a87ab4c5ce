"""Where a layer lives: its rank's share of the group, its dtype and its device. Passed, never looked up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's corner of the model."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Uninitialised weight memory."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
