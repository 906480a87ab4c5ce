"""RMSNorm, replicated on every rank. Sums and scaling are float32 whatever the dtype; the result is rounded once."""

import torch.nn.functional as F
from torch import Tensor

from workers.layers.placement import Placement
from workers.weights.source import WeightSource


class RMSNorm:
    """[T, size] -> [T, size]."""

    def __init__(self, name: str, size: int, eps: float, place: Placement) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.place = place

    @property
    def weight_bytes(self) -> int:
        return self.size * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        self.weight = self.place.empty(self.size)
        weights.take(f"{self.name}.weight", self.weight, shape=(self.size,))

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self.weight, self.eps)


class HeadNorm:
    """Qwen3's norm of each query and key head, for all heads of the rank at once: [T, heads + kv_heads, head_dim].

    The result stays float32, for the rotation that follows.
    """

    def __init__(
        self, name: str, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, place: Placement
    ) -> None:
        """`name` is the attention module's."""
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.eps = eps
        self.place = place

    @property
    def weight_bytes(self) -> int:
        return 4 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def load(self, weights: WeightSource) -> None:
        both = self.place.empty(2, self.head_dim)
        for index, part in enumerate(("q_norm", "k_norm")):
            weights.take(f"{self.name}.{part}.weight", both[index], shape=(self.head_dim,))
        counts = both.new_tensor([self.num_heads, self.num_kv_heads]).long()
        self.weight = both.float().repeat_interleave(counts, dim=0)  # [heads + kv_heads, head_dim]

    def __call__(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk.float(), (self.head_dim,), None, self.eps).mul_(self.weight)
