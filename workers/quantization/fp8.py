"""Weights of 8 bits in floating point (e4m3) with a scale for each group of an output's inputs, as in checkpoints.

Rows of x are not rounded. Products are added up in float32 within a group, or within 128 inputs of a longer group. Each
sum times the group's scale is added to the previous groups, in the order of inputs.
"""

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import PackedFp8
from oarlock.workers.quantization.groups import MOST_AT_ONCE, group_in_slices, pieces_of
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul, ReferenceGatedMatmul, ReferenceMatmul
from oarlock.workers.quantization.method import DenseWeight, Empty, LinearWeight, WeightShard
from oarlock.workers.quantization.packed_integers import Span, StoredPart, regroup, take_block, take_scales
from oarlock.workers.quantization.weight_only import UNITS, WeightOnly, of_float8
from oarlock.workers.weights.source import WeightSource


class Fp8Matmul(ReferenceMatmul):
    """`x @ weight.T + bias (+ residual)` with torch's operations: [T, K] -> [T, N].

    Sums of a group are in float64 and rounded once, so the order of additions almost never changes them.
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
        """Store `values` float8_e4m3fn [N, K] and `scales` float32 [N, groups]; `dtype` is the type of x, bias and
        results."""
        super().__init__(dtype, bias, float32_output=float32_output)
        self.values = values
        self.scales = scales
        self.group = group
        self.slices = pieces_of(values.shape[1], group, slices, MOST_AT_ONCE)

    def slice_sums(self, x: Tensor) -> list[Tensor]:
        return [self._slice(x, pieces) for pieces in self.slices]

    def _slice(self, x: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
        y = torch.zeros(len(x), len(self.values))
        for start, stop in pieces:
            products = x[:, start:stop].double() @ self.values[:, start:stop].double().T  # [T, N]
            y = y + products.float() * self.scales[:, start // self.group]
        return y


class Fp8Weight:
    """`LinearWeight` of 8-bit floats and their groups' scales."""

    def __init__(
        self, values: Tensor, scales: Tensor, group: int, dtype: torch.dtype, *, rounds_rows: bool = False
    ) -> None:
        """Store finite `values` float8_e4m3fn [N, K] and `scales` float32 [N, ceil(K / group)].

        With a scale for each output, `group` is K. `dtype` is the model's compute dtype. `rounds_rows`: devices may
        round x to float8 if it has many rows.
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
            both = Fp8Matmul(self.values, self.scales, self.group, self.dtype, bias)
            return ReferenceGatedMatmul(both, activation)
        return CppPackedGatedMatmul(self.packed(gated=True), self.dtype, bias, activation)

    def packed(self, *, slices: int = 1, gated: bool = False) -> PackedFp8:
        """Return the weight packed as the kernel reads it."""
        group = group_in_slices(self.values.shape[1], self.group, slices)
        return PackedFp8(self.values, self.scales, self.group, group_in_slices=group, gated=gated, slices=slices)

    def dequantised(self) -> Tensor:
        """Return the weight as float32 [N, K]."""
        return _times_scales(self.values, self.scales, self.group)

    def embed(self, ids: Tensor) -> Tensor:
        return _times_scales(self.values[ids], self.scales[ids], self.group).to(self.dtype)

    def on(self, device: torch.device) -> LinearWeight:
        if self.scales.shape[1] > 1 and self.group % UNITS[0]:  # kernels lack such a unit; no known checkpoint has it
            return DenseWeight(self.dequantised().to(device, self.dtype))
        stored = of_float8(self.values.to(device), self.scales, self.group, rounds_rows=self.rounds_rows)
        return WeightOnly(stored, self.dtype)


def _times_scales(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the dequantised values as float32 [N, K]."""
    group_of = torch.arange(values.shape[1]) // group
    return values.float() * scales[:, group_of]


class FP8LinearMethod:
    """`LinearMethod` of `weight` float8 [N, K] and its scales."""

    def __init__(self, scale: str, block: tuple[int, int | None] | None, *, rounds_rows: bool) -> None:
        """Set the format of the checkpoint.

        `scale`: suffix of the tensor of scales after the module's name. `block`: outputs and inputs that share a scale;
        None: all of them. `rounds_rows`: the checkpoint intends inputs to be rounded to float8.
        """
        self._rounds_rows = rounds_rows
        self._scale = scale
        self._height, self._width = (None, None) if block is None else block

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> Fp8Weight:
        values = torch.zeros((shard.rows, shard.local_inputs), dtype=torch.float8_e4m3fn)
        inputs = Span(shard.first_input, shard.first_input + shard.local_inputs)
        groups = torch.arange(shard.inputs) // (self._width or shard.inputs)  # [K]
        weight_format = regroup(groups, shard.all_slices, slice(inputs.first, inputs.stop), least=1)
        here = Span(int(groups[inputs.first]), int(groups[inputs.stop - 1]) + 1)
        scales = torch.zeros((shard.rows, len(weight_format.group_of)))
        row = 0
        for name, rows, first, view in shard.sources(weights, "weight", values):
            part = StoredPart(name, rows, shard.inputs, Span(first, first + len(view)), inputs)
            view.copy_(take_block(weights, f"{name}.weight", (rows, shard.inputs), part.rows, inputs, values.dtype))
            found = self._scales(weights, part, here)  # [N, groups]
            scales[row : row + len(view)] = found[:, weight_format.group_of - here.first]
            row += len(view)
        return Fp8Weight(values, scales, weight_format.group, empty(0).dtype, rounds_rows=self._rounds_rows)

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`."""
        into = empty(shard.rows, shard.local_inputs)
        into.copy_(self.load(shard, weights, empty).dequantised())
        return DenseWeight(into)

    def _scales(self, weights: WeightSource, part: StoredPart, groups: Span) -> Tensor:
        """Return the scales as float32 [N, groups]."""
        if self._height in (None, 1):
            return take_scales(weights, part, groups, self._scale)
        height, width = self._height, self._width or part.all_inputs
        shape = (-(-part.all_rows // height), -(-part.all_inputs // width))
        blocks = part.rows.of_words(height)
        found = take_block(weights, f"{part.name}.{self._scale}", shape, blocks, groups, torch.float32)
        return found.repeat_interleave(height, 0)[part.rows.within_words(height)]
