"""RMSNorm and LayerNorm, replicated on every rank. They compute in float32 whatever the dtype and round once."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.weights.source import WeightSource


class RMSNorm:
    """[T, size] -> [T, size], scaled by `offset + weight`.

    The scale is kept in float32 where there is an offset, because 16 bits would lose most of a weight near zero, and
    where a C++ kernel is used, which reads float32.
    """

    def __init__(self, name: str, size: int, eps: float, place: Placement, offset: float = 0.0) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.offset = offset
        self.place = place
        self.has_kernel = elementwise.can_serve(place.dtype, place.device)
        self.triton = triton_kernels() if availability.can_serve(place.device) else None

    @property
    def weight_bytes(self) -> int:
        return self.size * (4 if self.offset or self.has_kernel else self.place.dtype.itemsize)

    def load(self, weights: WeightSource) -> None:
        self.weight = self.place.empty(self.size)
        weights.take(f"{self.name}.weight", self.weight, shape=(self.size,))
        if self.offset or self.has_kernel:
            self.weight = self.weight.float() + self.offset

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.rms_norm(x, self.weight, self.eps)
        if self.triton is not None:
            return self.triton.rms_norm(x, self.weight, self.eps)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x.float(), (self.size,), self.weight, self.eps).to(x.dtype)

    def of_sum(self, residual: Tensor, x: Tensor, post_norm: "RMSNorm | None" = None) -> tuple[Tensor, Tensor]:
        """`residual + x`, both [T, size], and the norm of that sum, in `residual`'s type; `x` may be float32. With a
        `post_norm`, `x` is normed before."""
        if self.triton is None:
            total = (residual + (x if post_norm is None else post_norm(x))).to(residual.dtype)
            return total, self(total)
        post = None if post_norm is None else (post_norm.weight, post_norm.eps)
        return self.triton.add_and_norm(x, residual, self.weight, self.eps, post)


class LayerNorm:
    """Ba et al., 2016. [T, size] of the model's type or float32 -> [T, size] of the model's type.

    Scale and shift are kept in float32, which the C++ kernel reads.
    """

    def __init__(self, name: str, size: int, eps: float, bias: bool, place: Placement) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.has_bias = bias
        self.place = place
        self.has_kernel = elementwise.can_serve(place.dtype, place.device)

    @property
    def weight_bytes(self) -> int:
        return 4 * self.size * (2 if self.has_bias else 1)

    def load(self, weights: WeightSource) -> None:
        self.weight = self._taken(weights, "weight")
        self.bias = self._taken(weights, "bias") if self.has_bias else None

    def _taken(self, weights: WeightSource, kind: str) -> Tensor:
        into = self.place.empty(self.size)
        weights.take(f"{self.name}.{kind}", into, shape=(self.size,))
        return into.float()

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.layer_norm(x, self.weight, self.bias, self.eps, self.place.dtype)
        return F.layer_norm(x.float(), (self.size,), self.weight, self.bias, self.eps).to(self.place.dtype)


class HeadNorm:
    """Qwen3's and Gemma 3's norm of each query and key head, for all heads of the rank at once:
    [T, heads + kv_heads, head_dim]. The result stays float32, for the rotation that follows.
    """

    def __init__(
        self,
        name: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        place: Placement,
        offset: float = 0.0,
    ) -> None:
        """`name` is the attention module's."""
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.eps = eps
        self.offset = offset
        self.place = place
        self.has_kernel = elementwise.can_serve(place.dtype, place.device)

    @property
    def weight_bytes(self) -> int:
        return 4 * (self.num_heads + self.num_kv_heads) * self.head_dim

    def load(self, weights: WeightSource) -> None:
        both = self.place.empty(2, self.head_dim)
        for index, part in enumerate(("q_norm", "k_norm")):
            weights.take(f"{self.name}.{part}.weight", both[index], shape=(self.head_dim,))
        counts = both.new_tensor([self.num_heads, self.num_kv_heads]).long()
        self.weight = (both.float() + self.offset).repeat_interleave(counts, dim=0)  # [heads + kv_heads, head_dim]

    def __call__(self, qk: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.rms_norm(qk, self.weight, self.eps, float32_output=True)
        return F.rms_norm(qk.float(), (self.head_dim,), None, self.eps).mul_(self.weight)


Norm = RMSNorm | LayerNorm


def make_norm(name: str, size: int, spec: NormSpec, place: Placement) -> Norm:
    """The norm `name` of rows of `size` numbers."""
    if spec.kind == "layer":
        return LayerNorm(name, size, spec.eps, spec.bias, place)
    return RMSNorm(name, size, spec.eps, place, spec.offset)


def triton_kernels() -> Any:
    """`oarlock.workers.kernels.triton.elementwise`, imported where Triton is installed."""
    from oarlock.workers.kernels.triton import elementwise

    return elementwise
