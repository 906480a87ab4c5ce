"""Weights of 8 bits in floating point (e4m3) with a scale for each group of an output's inputs, as in checkpoints.

Rows of x are not rounded. Products are added up in float32 within a group, or within 128 inputs of a longer one; times
the group's scale they are added to those of the groups before, in the order of inputs.
"""

import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import PackedFp8
from oarlock.workers.quantization.groups import MOST_AT_ONCE, group_in_slices, pieces_of
from oarlock.workers.quantization.matmul import ACTIVATIONS, GatedMatmul, Matmul
from oarlock.workers.quantization.method import LinearWeight
from oarlock.workers.quantization.unquantized import DenseWeight
from oarlock.workers.quantization.weight_only import UNITS, WeightOnly, of_float8


class Fp8Matmul:
    """`x @ weight.T + bias (+ residual)` with torch's operations: [T, K] -> [T, N].

    Sums of a group are in float64 and rounded once, which no order of additions changes but by rare chance.
    """

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        group: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        *,
        float32_output: bool = False,
        slices: int = 1,
    ) -> None:
        """`values` float8_e4m3fn [N, K], `scales` float32 [N, groups]; `dtype` of x, bias and results."""
        self.values = values
        self.scales = scales
        self.group = group
        self.dtype = torch.float32 if float32_output else dtype
        self.bias = bias  # [N]
        self.slices = pieces_of(values.shape[1], group, slices, MOST_AT_ONCE)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.sums(x, residual).to(self.dtype)

    def sums(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result before it is rounded: float32 [T, N]."""
        y = tree_sum([self._slice(x, pieces) for pieces in self.slices])
        for addend in (self.bias, residual):
            if addend is not None:
                y = y + addend.float()
        return y

    def _slice(self, x: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
        y = torch.zeros(len(x), len(self.values))
        for start, stop in pieces:
            products = x[:, start:stop].double() @ self.values[:, start:stop].double().T  # [T, N]
            y = y + products.float() * self.scales[:, start // self.group]
        return y


class Fp8GatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)` with torch's operations: [T, K] -> [T, I]."""

    def __init__(
        self, values: Tensor, scales: Tensor, group: int, dtype: torch.dtype, bias: Tensor | None, activation: str
    ) -> None:
        """`values` [2 * I, K]: gate above up."""
        self.both = Fp8Matmul(values, scales, group, dtype, bias)
        self.activation = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both.sums(x).chunk(2, 1)
        return (self.activation(gate) * up).to(self.both.dtype)


class Fp8Weight:
    """`LinearWeight` of numbers of 8 bits and their groups' scales."""

    def __init__(
        self, values: Tensor, scales: Tensor, group: int, dtype: torch.dtype, *, rounds_rows: bool = False
    ) -> None:
        """`values` float8_e4m3fn [N, K], finite; `scales` float32 [N, ceil(K / group)].

        With a scale for each output `group` is K. `dtype` is the one that the model computes in. `rounds_rows`: many
        rows of x may be rounded to float8, on devices.
        """
        assert values.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32 and scales.shape == (len(values), -(-values.shape[1] // group))
        self.values = values
        self.scales = scales
        self.group = group
        self.dtype = dtype
        self.rounds_rows = rounds_rows

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        if library.why_not(self.dtype) is not None:
            return Fp8Matmul(
                self.values, self.scales, self.group, self.dtype, bias, float32_output=float32_output, slices=slices
            )
        return CppPackedMatmul(self.packed(slices=slices), self.dtype, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        if library.why_not(self.dtype) is not None:
            return Fp8GatedMatmul(self.values, self.scales, self.group, self.dtype, bias, activation)
        return CppPackedGatedMatmul(self.packed(gated=True), self.dtype, bias, activation)

    def packed(self, *, slices: int = 1, gated: bool = False) -> PackedFp8:
        """The weight packed as the kernel reads it."""
        group = group_in_slices(self.values.shape[1], self.group, slices)
        return PackedFp8(self.values, self.scales, self.group, group_in_slices=group, gated=gated, slices=slices)

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        return _times_scales(self.values, self.scales, self.group)

    def embed(self, ids: Tensor) -> Tensor:
        return _times_scales(self.values[ids], self.scales[ids], self.group).to(self.dtype)

    def on(self, device: torch.device) -> LinearWeight:
        if self.scales.shape[1] > 1 and self.group % UNITS[0]:  # no checkpoint that is known: kernels have no such unit
            return DenseWeight(self.dequantised().to(device, self.dtype))
        stored = of_float8(self.values.to(device), self.scales, self.group, rounds_rows=self.rounds_rows)
        return WeightOnly(stored, self.dtype)


def _times_scales(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """float32 [N, K]."""
    group_of = torch.arange(values.shape[1]) // group
    return values.float() * scales[:, group_of]
