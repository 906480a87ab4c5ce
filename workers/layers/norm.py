"""RMSNorm and LayerNorm, replicated on every rank. They compute in float32 for every dtype and round once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.kernels.cpu.structures import CHeadsOfRank
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import HeadShard
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.weights.source import WeightSource


class RMSNorm:
    """RMSNorm: [T, size] -> [T, size], multiplied by `factor * (offset + weight)`.

    The scale is kept in float32 if there is an offset or a factor, because 16 bits would lose most of a weight near
    zero or round it once more, and if a C++ kernel is used, because it reads float32.
    """

    def __init__(
        self, name: str, size: int, eps: float, placement: Placement, offset: float = 0.0, factor: float = 1.0
    ) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.offset = offset
        self.factor = factor
        self.placement = placement
        self.has_kernel = elementwise.can_serve(placement.dtype, placement.device)
        self.is_wide = bool(offset) or factor != 1.0 or self.has_kernel
        self.triton = triton_kernels() if availability.can_serve(placement.device) else None

    @property
    def weight_bytes(self) -> int:
        return self.size * (4 if self.is_wide else self.placement.dtype.itemsize)

    def load(self, weights: WeightSource) -> None:
        self.weight = self.placement.empty(self.size)
        weights.take(f"{self.name}.weight", self.weight, shape=(self.size,))
        if self.is_wide:
            self.weight = self.weight.float() + self.offset
        if self.factor != 1.0:
            self.weight *= self.factor

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.rms_norm(x, self.weight, self.eps)
        if self.triton is not None:
            return self.triton.rms_norm(x, self.weight, self.eps)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.rms_norm(x.float(), (self.size,), self.weight, self.eps).to(x.dtype)

    def add_and_norm(self, residual: Tensor, x: Tensor, post_norm: "RMSNorm | None" = None) -> tuple[Tensor, Tensor]:
        """Return `residual + x`, both [T, size], and the norm of this sum, in `residual`'s dtype. `x` may be float32;
        with `post_norm` it is normed before the addition."""
        if self.triton is None:
            total = (residual + (x if post_norm is None else post_norm(x))).to(residual.dtype)
            return total, self(total)
        post = None if post_norm is None else (post_norm.weight, post_norm.eps)
        return self.triton.add_and_norm(x, residual, self.weight, self.eps, post)


class LayerNorm:
    """LayerNorm (Ba et al., 2016): [T, size] of the model's dtype or float32 -> [T, size] of the model's dtype.

    It is multiplied by `offset + weight` if there is a weight. Scale and shift are kept in float32, which the C++
    kernel reads.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        bias: bool,
        placement: Placement,
        *,
        has_weight: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.has_weight, self.has_bias = has_weight, bias
        self.offset = offset
        self.placement = placement
        self.has_kernel = elementwise.can_serve(placement.dtype, placement.device)

    @property
    def weight_bytes(self) -> int:
        return 4 * self.size * (self.has_weight + self.has_bias)

    def load(self, weights: WeightSource) -> None:
        self.weight = self._taken(weights, "weight") + self.offset if self.has_weight else None
        self.bias = self._taken(weights, "bias") if self.has_bias else None

    def _taken(self, weights: WeightSource, kind: str) -> Tensor:
        into = self.placement.empty(self.size)
        weights.take(f"{self.name}.{kind}", into, shape=(self.size,))
        return into.float()

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.layer_norm(x, self.weight, self.bias, self.eps, self.placement.dtype)
        return F.layer_norm(x.float(), (self.size,), self.weight, self.bias, self.eps).to(self.placement.dtype)


class HeadNorm:
    """Norm of each query and key head (Qwen3, Gemma 3), for all heads of the rank at once.

    [T, heads + kv_heads, head_dim] -> the same shape in float32, for the rotation that follows. A norm after the
    rotation is computed by `rotary.finish_heads`, from `weight` and `eps`.
    """

    def __init__(
        self,
        name: str,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        placement: Placement,
        offset: float = 0.0,
        *,
        is_stored: bool = True,
    ) -> None:
        """Prepare the norm. `name` is the attention module's name. `num_kv_heads`: 0 if there are no own keys.
        `is_stored`: the checkpoint has its scale; False: the norm does not scale its results."""
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.eps = eps
        self.offset = offset
        self.is_stored = is_stored
        self.placement = placement
        self.has_kernel = elementwise.can_serve(placement.dtype, placement.device)

    @property
    def weight_bytes(self) -> int:
        return 4 * (self.num_heads + self.num_kv_heads) * self.head_dim if self.is_stored else 0

    def load(self, weights: WeightSource) -> None:
        if not self.is_stored:
            heads = self.num_heads + self.num_kv_heads
            self.weight = torch.ones((heads, self.head_dim), device=self.placement.device)
            return
        counts = {"q_norm": self.num_heads, "k_norm": self.num_kv_heads}
        counts = {part: count for part, count in counts.items() if count}
        both = self.placement.empty(len(counts), self.head_dim)
        for index, part in enumerate(counts):
            weights.take(f"{self.name}.{part}.weight", both[index], shape=(self.head_dim,))
        of_each = zip(both.float() + self.offset, counts.values(), strict=True)
        self.weight = torch.cat([one.expand(count, -1) for one, count in of_each])  # [heads + kv_heads, head_dim]

    def __call__(self, qk: Tensor) -> Tensor:
        if self.has_kernel:
            return elementwise.rms_norm(qk, self.weight, self.eps, float32_output=True)
        return F.rms_norm(qk.float(), (self.head_dim,), None, self.eps).mul_(self.weight)


class RowNorm:
    """Norm of queries and of keys over all heads of a row (OLMo 2); the rank has some of the heads.

    [T, heads + kv_heads, head_dim] -> the same shape in float32, for the rotation that follows. One rank computes the
    sum of squares of each head, and every rank adds the sums of all heads in the same order, so the bits do not depend
    on the number of ranks.
    """

    def __init__(
        self, name: str, shard: HeadShard, heads: tuple[int, int], head_dim: int, spec: NormSpec, placement: Placement
    ) -> None:
        """Prepare the norm. `name` is the attention module's name; `heads`: number of query and of key heads over all
        ranks."""
        self.name = name
        self.head_dim = head_dim
        self.eps = spec.eps
        self.offset = spec.offset
        self.placement = placement
        self.has_kernel = elementwise.can_serve(placement.dtype, placement.device)
        copies = max(1, placement.tp.size // heads[1])  # number of neighbouring ranks that hold the same key-value head
        self.rank_heads = CHeadsOfRank(
            shard.num_heads, shard.num_kv_heads, *heads, shard.first_head, shard.first_kv_head,
            placement.tp.rank % copies == 0,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        return 4 * (self.rank_heads.heads + self.rank_heads.kv_heads) * self.head_dim

    def load(self, weights: WeightSource) -> None:
        own, width = self.rank_heads, self.head_dim
        parts = (
            ("q_norm", own.all_heads, own.first_head, own.heads),
            ("k_norm", own.all_kv_heads, own.first_kv_head, own.kv_heads),
        )
        found = []
        for part, heads, first, count in parts:
            found.append(self.placement.empty(count * width))
            name = f"{self.name}.{part}.weight"
            weights.take(name, found[-1], shape=(heads * width,), dim=0, start=first * width)
        self.weight = torch.cat([one.float() for one in found]).view(-1, width) + self.offset

    def __call__(self, qk: Tensor) -> Tensor:
        squares = self.squares(qk)
        if self.placement.tp.size > 1:
            # only one rank has each sum, the others have zeros: the all-reduce is exact
            squares = self.placement.tp.all_reduce(squares)
        if self.has_kernel:
            return elementwise.norm_of_rows(self.rank_heads, qk, squares, self.weight, self.eps)
        heads = (self.rank_heads.all_heads, self.rank_heads.all_kv_heads)
        means = [part.double().sum(1) / (part.shape[1] * self.head_dim) for part in squares.split(heads, 1)]
        factors = torch.stack(means, 1).add(self.eps).rsqrt().float()  # [T, 2]
        counts = torch.tensor([self.rank_heads.heads, self.rank_heads.kv_heads], device=qk.device)
        return qk.float() * factors.repeat_interleave(counts, 1).unsqueeze(2) * self.weight

    def squares(self, qk: Tensor) -> Tensor:
        """Return the sum of squares of each head: float32 [T, all query heads, then all key heads], 0 for other ranks'
        heads."""
        own = self.rank_heads
        if self.has_kernel:
            return elementwise.squares_of_heads(own, qk)
        squares = qk.new_zeros((len(qk), own.all_heads + own.all_kv_heads), dtype=torch.float32)
        found = qk.float().square().sum(2)  # [T, heads + kv_heads]
        squares[:, own.first_head : own.first_head + own.heads] = found[:, : own.heads]
        if own.sums_keys:
            first = own.all_heads + own.first_kv_head
            squares[:, first : first + own.kv_heads] = found[:, own.heads :]
        return squares


Norm = RMSNorm | LayerNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `x` [T, size] times `weight` float32 [size], in the dtype of `x`."""
    if elementwise.can_serve(x.dtype, x.device):
        return elementwise.rms_norm(x, weight, eps)
    if availability.can_serve(x.device):
        return triton_kernels().rms_norm(x, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def make_norm(name: str, size: int, spec: NormSpec, placement: Placement, factor: float = 1.0) -> Norm:
    """Return the norm called `name` for rows of `size` values, with `factor` times its results."""
    if spec.kind == "layer":
        assert factor == 1.0, "only results of an RMSNorm are scaled"
        return LayerNorm(name, size, spec.eps, spec.bias, placement, has_weight=spec.weight, offset=spec.offset)
    assert spec.weight, "an RMSNorm without a weight is not supported"
    return RMSNorm(name, size, spec.eps, placement, spec.offset, factor)


def triton_kernels() -> Any:
    """Return the module `oarlock.workers.kernels.triton.elementwise`, imported only if Triton is installed."""
    from oarlock.workers.kernels.triton import elementwise

    return elementwise


class LayerScalar:
    """A stored factor of a layer's result: [T, hidden] -> [T, hidden]."""

    weight_bytes = 4

    def __init__(self, name: str, placement: Placement) -> None:
        self.name = name
        self.weight = torch.empty(1, dtype=torch.float32, device=placement.device)

    def load(self, weights: WeightSource) -> None:
        weights.take(self.name, self.weight, shape=(1,))

    def __call__(self, hidden: Tensor) -> Tensor:
        return (hidden.float() * self.weight).to(hidden.dtype)
