"""The tensor-parallel group as a value: layers take it in their constructor and never read a global.

The only module that imports `torch.distributed`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """`rank` of `size` identical processes. Reductions add in rank order, so every rank ends with the same bits."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @staticmethod
    def solo() -> TensorParallel:
        """A group of one: every collective is the identity. It makes each layer testable without processes."""
        return TensorParallel()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of `x` (any shape), bitwise the same on every rank. May reuse `x`'s memory."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` (equal shapes), stacked in rank order: [size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out
