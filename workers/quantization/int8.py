"""Weights rounded to 8 bits at load, with one scale for each output (`--quantization int8`).

A matmul rounds each row of its inputs to 8 bits as well, and adds up products of integers, which is exact. So its bits
do not depend on the order of additions: `Int8Matmul` is the reference, and the kernel equals it bit by bit.
"""

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import PackedInt8
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul, ReferenceGatedMatmul, ReferenceMatmul
from oarlock.workers.quantization.method import DenseWeight, Empty, WeightShard
from oarlock.workers.quantization.weight_only import WeightOnly, of_channels
from oarlock.workers.weights.source import WeightSource

_LARGEST = 127.0
_SMALLEST = 1e-30  # a row without a larger value is all zeros: its scale has no inverse
_ROWS_AT_ONCE = 1024  # rows of a weight that are rounded at a time, in float32


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row [K] of `x` to integers from -127 to 127 with a scale.

    `x` [T, K] -> int8 [T, K], float32 [T]. A row with NaN or infinity has the scale NaN.
    """
    x = x.float()
    size = x.abs().amax(1)
    largest = torch.full_like(size, _LARGEST)  # a tensor: torch may multiply by the inverse of a plain number
    scales = torch.where(size.isfinite(), size / largest, float("nan"))
    inverse = torch.where(size > _SMALLEST, largest / size, 0.0)
    return (x * inverse.unsqueeze(1)).round_().nan_to_num_(0.0).to(torch.int8), scales


class Int8Matmul(ReferenceMatmul):
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
        """Store `values` int8 [N, K] and `scales` float32 [N]; `dtype` is the type of x, bias and results.

        `slices`: see `LinearWeight.matmul`.
        """
        super().__init__(dtype, bias, float32_output=float32_output)
        self.values = values
        self.scales = scales
        self.slices = slices

    def slice_sums(self, x: Tensor) -> list[Tensor]:
        slices = zip(x.chunk(self.slices, 1), self.values.chunk(self.slices, 1), strict=True)
        return [self._slice(part, values) for part, values in slices]

    def _slice(self, x: Tensor, values: Tensor) -> Tensor:
        rows, scales = round_rows(x)
        whole = rows.double() @ values.double().T  # [T, N], exact
        return whole.float() * self.scales * scales.unsqueeze(1)


class Int8Weight:
    """`LinearWeight` of integers and scales."""

    def __init__(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """Store `values` int8 [N, K], which may contain -128, and `scales` float32 [N]; `dtype` is the model's compute
        dtype."""
        self.values = values
        self.scales = scales
        self.dtype = dtype

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        if library.why_not(self.dtype) is not None:
            return Int8Matmul(self.values, self.scales, self.dtype, bias, float32_output=float32_output, slices=slices)
        packed = PackedInt8(self.values, self.scales, slices=slices)
        return CppPackedMatmul(packed, self.dtype, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        if library.why_not(self.dtype) is not None:
            return ReferenceGatedMatmul(Int8Matmul(self.values, self.scales, self.dtype, bias), activation)
        packed = PackedInt8(self.values, self.scales, gated=True)
        return CppPackedGatedMatmul(packed, self.dtype, bias, activation)

    def embed(self, ids: Tensor) -> Tensor:
        return (self.values[ids].float() * self.scales[ids].unsqueeze(1)).to(self.dtype)

    def on(self, device: torch.device) -> WeightOnly:
        return WeightOnly(of_channels(self.values.to(device), self.scales.to(device)), self.dtype)


class Int8LinearMethod:
    """`LinearMethod` that reads a weight in its stored dtype and rounds it to 8 bits."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> Int8Weight:
        # The scale of an output comes from its whole row, so that its weights do not depend on the number of ranks.
        whole = shard.take(weights, empty, whole_rows=True)
        here = slice(shard.first_input, shard.first_input + shard.local_inputs)
        values = torch.empty((shard.rows, shard.local_inputs), dtype=torch.int8, device=whole.device)
        scales = torch.empty(shard.rows, device=whole.device)
        for row in range(0, shard.rows, _ROWS_AT_ONCE):
            part = slice(row, row + _ROWS_AT_ONCE)
            rounded, scales[part] = round_rows(whole[part])
            values[part] = rounded[:, here]
        return Int8Weight(values, scales, whole.dtype)

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`."""
        weight = self.load(shard, weights, empty)
        into = empty(shard.rows, shard.local_inputs)
        for row in range(0, shard.rows, _ROWS_AT_ONCE):
            part = slice(row, row + _ROWS_AT_ONCE)
            into[part] = weight.values[part].float().mul_(weight.scales[part].unsqueeze(1))
        return DenseWeight(into)
