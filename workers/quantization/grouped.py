"""Weights of few bits with a scale, and perhaps an offset, for each group of an output's inputs, as in checkpoints.

Every matmul rounds each row of its inputs to 8 bits, as for weights of 8 bits per output. The sum of a group is over
integers, hence exact, and groups are added up in float32 in the order of inputs. `GroupedMatmul` is the reference, and
the kernel equals it bit by bit.

A scale is kept as a float16 times a power of two per output. Scales that are float16 or bfloat16 in a checkpoint are
kept exactly; others, such as the products of two scales of Q4_K, lose at most a relative 2**-11. An offset is kept as
its multiple of the scale, in float16. This is exact if the multiple is an integer, like the zero points of GPTQ and
AWQ; otherwise it also loses at most a relative 2**-11.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.quantized_gemm import PackedGrouped
from oarlock.workers.model_files.gguf_header import GroupLayout
from oarlock.workers.quantization.groups import group_in_slices, group_of_blocks, kernel_group, pieces_of
from oarlock.workers.quantization.int8 import round_rows
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul, ReferenceGatedMatmul, ReferenceMatmul
from oarlock.workers.quantization.method import DenseWeight, Empty, LinearWeight, UnquantizedLinearMethod, WeightShard
from oarlock.workers.quantization.weight_only import WeightOnly, of_groups, of_mxfp4
from oarlock.workers.weights import float4
from oarlock.workers.weights.gguf_reader import GGUFReader, Groups
from oarlock.workers.weights.source import PaddedSource, WeightSource

# The largest scale of an output is below 2 ** 15, so that it can be rounded up. Just below 2 ** 16 it could not, and a
# rank with other inputs of the output, and so another largest scale, would round it differently.
_LARGEST_EXPONENT = 15
_MOST_MULTIPLES = 32768.0  # maximum ratio of an offset to its scale
_SMALLEST_EXPONENT = -100  # smaller scales lose bits: their output is zero except for rounding


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """weight[n, k] = (values[n, k] + zeros[n, k // group]) * scales[n, k // group] * factors[n]."""

    values: Tensor  # int8 [N, K]
    scales: Tensor  # float16 [N, groups]
    zeros: Tensor | None  # float16 [N, groups]
    factors: Tensor  # float32 [N], powers of two
    group: int

    def dequantised(self) -> Tensor:
        """Return the weight as float32 [N, K]."""
        group_of = torch.arange(self.values.shape[1]) // self.group
        values = self.values.float()
        if self.zeros is not None:
            values = values + self.zeros.float()[:, group_of]
        return values * self.scales.float()[:, group_of] * self.factors.unsqueeze(1)

    def rows(self, ids: Tensor) -> "StoredGroups":
        """Return the groups of only the outputs `ids`."""
        zeros = None if self.zeros is None else self.zeros[ids]
        return StoredGroups(self.values[ids], self.scales[ids], zeros, self.factors[ids], self.group)


def stored_groups(values: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> StoredGroups:
    """Return `StoredGroups` of values int8 [N, K], scales float32 [N, groups] and offsets [N, groups] or None.

    If an offset is more than 32,768 times its scale, for example because the scale is zero, the group becomes only its
    offset.
    """
    scales = scales.float()
    zeros = None
    if offsets is not None:
        alone = offsets.abs() > _MOST_MULTIPLES * scales.abs()  # [N, groups]
        if alone.any():
            scales = torch.where(alone, offsets, scales)
            values = torch.where(alone.repeat_interleave(group, 1)[:, : values.shape[1]], 0, values)
    _, exponents = torch.frexp(scales.abs().amax(1))
    exponents = exponents.clamp(min=_SMALLEST_EXPONENT) - _LARGEST_EXPONENT
    factors = torch.pow(2.0, exponents.double()).unsqueeze(1)  # [N, 1]
    halves = (scales.double() / factors).half()
    if offsets is not None:
        zeros = torch.where(halves == 0, 0.0, offsets.double() / (halves.double() * factors)).half()
    return StoredGroups(values, halves, zeros, factors.squeeze(1).float(), group)


class GroupedMatmul(ReferenceMatmul):
    """`x @ weight.T + bias (+ residual)` with torch's operations: [T, K] -> [T, N]."""

    def __init__(
        self,
        weight: StoredGroups,
        order: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None,
        *,
        float32_output: bool = False,
        slices: int = 1,
    ) -> None:
        """Use `order` int64 [K]: input k of the weight is input order[k] of x. `dtype`: of x, bias and results."""
        super().__init__(dtype, bias, float32_output=float32_output)
        self.weight = weight
        self.order = order
        inputs = weight.values.shape[1]
        self.length = inputs // slices
        unit = kernel_group(group_in_slices(inputs, weight.group, slices))
        self.slices = pieces_of(inputs, weight.group, slices, unit)

    def slice_sums(self, x: Tensor) -> list[Tensor]:
        if self.order is not None:
            x = x[:, self.order]
        return [self._slice(part, pieces) for part, pieces in zip(x.split(self.length, 1), self.slices, strict=True)]

    def _slice(self, x: Tensor, pieces: list[tuple[int, int]]) -> Tensor:
        weight = self.weight
        rows, row_scales = round_rows(x)
        y = torch.zeros(len(x), len(weight.values))
        first = pieces[0][0]
        for start, stop in pieces:
            group = start // weight.group
            here = rows[:, start - first : stop - first].float()
            whole = here @ weight.values[:, start:stop].float().T  # [T, N], exact: below 2 ** 24
            if weight.zeros is not None:
                whole = whole + here.sum(1, keepdim=True) * weight.zeros[:, group].float()  # exact, too
            y = y + whole * weight.scales[:, group].float()
        return y * weight.factors * row_scales.unsqueeze(1)


class GroupedWeight:
    """`LinearWeight` of integers and their groups' scales."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        group: int,
        dtype: torch.dtype,
        *,
        offsets: Tensor | None = None,
        bits: int,
        is_float: bool = False,
        order: Tensor | None = None,
    ) -> None:
        """Store weight[n, k] = values[n, k] * scales[n, k // group] + offsets[n, k // group].

        `values` int8 [N, K], from -8 to 7 for 4 `bits` or from -128 to 127 for 8; `scales` and `offsets` float32 [N,
        ceil(K / group)]; `group` a multiple of 16. `order` int64 [K]: input k of the values is input order[k] of x; an
        input may be repeated if the weight is zero. `is_float`: values are doubled 4-bit floats (e2m1), and stored as
        such. `dtype` is the model's compute dtype.
        """
        assert bits in (4, 8) and values.dtype == torch.int8 and group % 16 == 0
        groups = (len(values), -(-values.shape[1] // group))
        assert scales.shape == groups and (offsets is None or offsets.shape == groups)
        assert not is_float or (bits == 4 and offsets is None and order is None)
        self.weight = stored_groups(values, scales, offsets, group)
        self.bits = bits
        self.is_float = is_float
        self.order = order
        self.dtype = dtype

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        if library.why_not(self.dtype) is not None:
            return GroupedMatmul(
                self.weight, self.order, self.dtype, bias, float32_output=float32_output, slices=slices
            )
        return CppPackedMatmul(self.packed(slices=slices), self.dtype, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        if library.why_not(self.dtype) is not None:
            return ReferenceGatedMatmul(GroupedMatmul(self.weight, self.order, self.dtype, bias), activation)
        return CppPackedGatedMatmul(self.packed(gated=True), self.dtype, bias, activation)

    def packed(self, *, slices: int = 1, gated: bool = False, kind: int | None = None) -> PackedGrouped:
        """Return the weight packed as the kernel reads it; `kind`: None for the fastest."""
        weight = self.weight
        inputs = weight.values.shape[1]
        unit = kernel_group(group_in_slices(inputs, weight.group, slices))
        return PackedGrouped(
            weight.values,
            weight.scales,
            weight.zeros,
            weight.factors,
            weight.group,
            bits=self.bits,
            is_float=self.is_float,
            pieces=pieces_of(inputs, weight.group, slices, unit),
            kernel_group=unit,
            order=self.order,
            gated=gated,
            kind=kind,
        )

    def embed(self, ids: Tensor) -> Tensor:
        rows = self.weight.rows(ids).dequantised()
        if self.order is not None:
            rows = torch.empty_like(rows).index_copy_(1, self.order, rows)
        return rows.to(self.dtype)

    def on(self, device: torch.device) -> LinearWeight:
        weight, order = self.weight, None if self.order is None else self.order.to(device)
        if self.is_float and weight.group != float4.GROUP:  # a slice that cuts a group; no known model has it
            return DenseWeight(weight.dequantised().to(device, self.dtype))
        if self.is_float:
            pairs, exponents = float4.packed(weight.values, weight.scales.float() * weight.factors.unsqueeze(1))
            return WeightOnly(of_mxfp4(pairs.to(device), exponents), self.dtype)
        stored = of_groups(
            weight.values.to(device), weight.scales, weight.zeros, weight.factors, weight.group, self.bits
        )
        return WeightOnly(stored, self.dtype, order)


class GGUFLinearMethod:
    """`LinearMethod` of GGUF weights, which are stored in blocks."""

    def __init__(self, weight_format: GroupLayout) -> None:
        self._weight_format = weight_format

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        assert isinstance(weights, GGUFReader | PaddedSource), "only a GGUF file has weights of this format"
        weight_format = self._weight_format
        group = group_of_blocks(weight_format.group, shard.local_inputs, shard.slices)
        if group is None:
            return self.dequantised(shard, weights, empty)
        groups = Groups.empty(shard.rows, shard.local_inputs, group, offsets=weight_format.has_offsets)
        first = 0
        for name, rows, start, view in shard.sources(weights, "weight", torch.empty((shard.rows, 0))):
            weights.take_groups(
                f"{name}.weight",
                groups.rows(first, len(view)),
                shape=(rows, shard.inputs),
                first_row=start,
                first_input=shard.first_input,
            )
            first += len(view)
        if shard.padding:
            groups.values[first:] = 0
            groups.scales[first:] = 0.0
        return GroupedWeight(
            groups.values, groups.scales, group, empty(0).dtype, offsets=groups.offsets, bits=weight_format.bits,
            is_float=weight_format.is_float,
        )  # fmt: skip

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`."""
        return UnquantizedLinearMethod().load(shard, weights, empty)
