"""Float32 sums of any matmul, before its activation, its residual and its rounding.

An adapter's update is added to these sums, and rounded once together with them, as if it was part of the weight.
Matmuls of libraries that only return 16-bit results are rounded before, and once more afterwards.
"""

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.gemm import CppGatedMatmul, CppMatmul, CppPackedGatedMatmul, CppPackedMatmul
from oarlock.workers.kernels.cpu.packed_sums import PackedSums
from oarlock.workers.quantization.fixed_order import FixedOrderMatmul
from oarlock.workers.quantization.matmul import (
    ActivatedMatmul,
    Float32Matmul,
    PackedGatedMatmul,
    PackedMatmul,
    PairedRows,
    PlainGatedMatmul,
    PlainMatmul,
    ReferenceGatedMatmul,
    ReferenceMatmul,
    SlicedMatmul,
)
from oarlock.workers.quantization.method import StackedGatedMatmul, StackedMatmul
from oarlock.workers.quantization.weight_only import WeightOnlyGatedMatmul, WeightOnlyMatmul

Sums = Callable[[Tensor], Tensor]


def float32_sums(multiply: object) -> Sums:
    """Return the function x [T, K] -> `x @ weight.T + bias`, float32 [T, N]; of a gated matmul gate before up.

    Raises `TypeError` for a matmul that is not known here.
    """
    if isinstance(multiply, CppMatmul | CppPackedMatmul | CppGatedMatmul | CppPackedGatedMatmul):
        return PackedSums.of(multiply)
    if isinstance(multiply, ReferenceMatmul):
        return multiply.sums
    if isinstance(multiply, Float32Matmul):
        return multiply
    if isinstance(multiply, PlainMatmul):
        return _plain(multiply)
    if isinstance(multiply, PackedMatmul):
        return lambda x: multiply(x).float()
    if isinstance(multiply, SlicedMatmul):
        wide = copy(multiply)
        wide.dtype = torch.float32
        return wide
    if isinstance(multiply, FixedOrderMatmul):
        ordered = copy(multiply)
        ordered.activation, ordered.output_dtype = "", torch.float32
        return ordered
    if isinstance(multiply, WeightOnlyMatmul):
        return WeightOnlyMatmul(multiply.weight, multiply.order, multiply.dtype, multiply.bias, float32_output=True)
    if isinstance(multiply, PairedRows):
        return PairedRows(float32_sums(multiply.multiply))
    return _sums_of_parts(multiply)


def _sums_of_parts(multiply: object) -> Sums:
    """Do the same for matmuls made of others."""
    if isinstance(multiply, ActivatedMatmul):
        return float32_sums(multiply.multiply)
    if isinstance(multiply, ReferenceGatedMatmul | PlainGatedMatmul | WeightOnlyGatedMatmul):
        return float32_sums(multiply.both)
    if isinstance(multiply, PackedGatedMatmul | StackedGatedMatmul):
        return _stacked([multiply.gate, multiply.up])
    if isinstance(multiply, StackedMatmul):
        return _stacked(multiply.matmuls)
    raise TypeError(f"a {type(multiply).__name__} has no sums that an adapter could be added to")


def _stacked(matmuls: Sequence[object]) -> Sums:
    parts = [float32_sums(one) for one in matmuls]
    return lambda x: torch.cat([part(x) for part in parts], 1)


def _plain(multiply: PlainMatmul) -> Sums:
    """Return the sums of `F.linear`, unrounded if torch can return them."""
    weight, bias = multiply.weight, multiply.bias
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        return lambda x: multiply(x).float()

    def sums(x: Tensor) -> Tensor:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y.add_(bias)

    return sums
