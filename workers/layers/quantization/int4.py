"""Weights rounded to 4 bits at load, with one scale for each 32 inputs of an output (`--quantization int4`).

A product rounds each row of its inputs to 8 bits. Sums of a group are of whole numbers, which is exact, and groups are
added up in order: `Int4Matmul` is the reference, and the kernel equals it bit by bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.distributed.tree_sum import tree_sum
from workers.kernels.cpu import library
from workers.kernels.cpu.int4_gemm import GROUP, PackedInt4
from workers.kernels.cpu.int8_gemm import CppInt8GatedMatmul, CppInt8Matmul
from workers.layers.matmul import ACTIVATIONS, GatedMatmul, Matmul
from workers.layers.quantization.int8 import round_rows
from workers.layers.quantization.shard import Empty, WeightShard
from workers.weights.source import WeightSource

_ROWS_AT_ONCE = 256  # of a weight, in float32


def round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row [K] of `x` in groups of inputs, as whole numbers from -8 to 7 and the scale they are multiples of.

    The number of the largest size is -8 times the scale, which may be negative: so all 16 numbers are used, where a
    scale without a sign would leave one or cut the largest off.

    `x` [N, K] -> int8 [N, K], bfloat16 [N, groups].
    """
    rows, inputs = x.shape
    grouped = F.pad(x.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)  # [N, groups, GROUP]
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # [N, groups, 1], with its sign
    scales = (largest / -8.0).to(torch.bfloat16)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (grouped * inverse).round_().nan_to_num_(0.0).clamp_(-8, 7)
    return values.to(torch.int8).view(rows, -1)[:, :inputs], scales.squeeze(2)


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """int8 [N, K] and bfloat16 [N, groups] -> float32 [N, K]."""
    return values.float() * scales.float().repeat_interleave(GROUP, 1)[:, : values.shape[1]]


class Int4Matmul:
    """`x @ weight.T + bias (+ residual)` with torch's operations: [T, K] -> [T, N]."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None,
        *,
        float32_output: bool = False,
        slices: int = 1,
    ) -> None:
        """`values` int8 [N, K], `scales` bfloat16 [N, groups]; `dtype` of x, bias and results.

        `slices`: see `LinearWeight.matmul`.
        """
        self.values = values
        self.scales = scales
        self.dtype = torch.float32 if float32_output else dtype
        self.bias = bias  # [N]
        self.slices = slices

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.sums(x, residual).to(self.dtype)

    def sums(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result before it is rounded: float32 [T, N]."""
        length = x.shape[1] // self.slices
        y = tree_sum([self._slice(x, start, start + length) for start in range(0, x.shape[1], length)])
        for addend in (self.bias, residual):
            if addend is not None:
                y = y + addend.float()
        return y

    def _slice(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The sum over some inputs; groups are cut where they begin and end."""
        rows, row_scales = round_rows(x[:, start:stop])
        y = torch.zeros(len(x), len(self.values))
        for group, scales in enumerate(self.scales.float().unbind(1)):
            first, last = max(start, group * GROUP), min(stop, (group + 1) * GROUP)
            if first >= last:
                continue
            weights = self.values[:, first:last].float()
            whole = rows[:, first - start : last - start].float() @ weights.T  # [T, N], exact: below 2 ** 24
            y = y + whole * scales
        return y * row_scales.unsqueeze(1)


class Int4GatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)` with torch's operations: [T, K] -> [T, I]."""

    def __init__(
        self, values: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None, activation: str
    ) -> None:
        """`values` int8 [2 * I, K]: gate above up."""
        self.both = Int4Matmul(values, scales, dtype, bias)
        self.activation = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both.sums(x).chunk(2, 1)
        return (self.activation(gate) * up).to(self.both.dtype)


class Int4Weight:
    """`LinearWeight` of whole numbers and scales."""

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """`values` int8 [N, K], `scales` bfloat16 [N, groups]; `dtype` is the one that the model computes in."""
        self.values = values
        self.scales = scales
        self.dtype = dtype

    @classmethod
    def rounded(cls, weight: Tensor) -> "Int4Weight":
        """Of a weight [N, K] that need not be kept."""
        rows, inputs = weight.shape
        values = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty((rows, -(-inputs // GROUP)), dtype=torch.bfloat16)
        for row in range(0, rows, _ROWS_AT_ONCE):
            part = slice(row, row + _ROWS_AT_ONCE)
            values[part], scales[part] = round_groups(weight[part])
        return cls(values, scales, weight.dtype)

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        if library.why_not(self.dtype) is not None:
            return Int4Matmul(self.values, self.scales, self.dtype, bias, float32_output=float32_output, slices=slices)
        packed = PackedInt4(self.values, self.scales, slices=slices)
        return CppInt8Matmul(packed, self.dtype, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        if library.why_not(self.dtype) is not None:
            return Int4GatedMatmul(self.values, self.scales, self.dtype, bias, activation)
        packed = PackedInt4(self.values, self.scales, gated=True)
        return CppInt8GatedMatmul(packed, self.dtype, bias, activation)

    def embed(self, ids: Tensor) -> Tensor:
        return dequantised(self.values[ids], self.scales[ids]).to(self.dtype)


class Int4LinearMethod:
    """Reads a weight in the dtype that it is stored in, and rounds it."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> Int4Weight:
        # A shard begins where a group does, so that its weights are the same at every number of ranks.
        assert shard.first_input % GROUP == 0, f"a shard begins within a group, at input {shard.first_input}"
        return Int4Weight.rounded(shard.take(weights, empty))
