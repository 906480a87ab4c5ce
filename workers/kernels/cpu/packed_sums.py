"""Float32 sums of packed weights, before bias, activation and rounding, of matmuls that fuse these into the kernel.

The kernel adds up in the same order for every epilogue, so the fused matmul rounds exactly these sums.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.kernels.cpu.gemm import (
    ELEMENT_TYPES,
    CppGatedMatmul,
    CppMatmul,
    CppPackedGatedMatmul,
    CppPackedMatmul,
    Epilogue,
    bound,
)
from oarlock.workers.kernels.cpu.quantized_gemm import FLOAT8, GROUPED, GROUPED_DOT, INT8, INT8_DOT, declared

DENSE = 0  # the kind of a packed weight in the model's dtype: `WeightKind` in csrc/gemm/int8.h
_FUNCTIONS = {
    DENSE: "oarlock_gemm", INT8: "oarlock_int8_gemm", INT8_DOT: "oarlock_int8_gemm", GROUPED: "oarlock_grouped_gemm",
    GROUPED_DOT: "oarlock_grouped_gemm", FLOAT8: "oarlock_fp8_gemm",
}  # fmt: skip
_TAKE_KIND = (INT8, INT8_DOT, GROUPED, GROUPED_DOT)  # kinds that the kernel gets as an argument


@dataclass(frozen=True, slots=True)
class PackedSums:
    """`x @ weight.T + bias` of a packed weight [N, K]: x [T, K] -> float32 [T, N]; of gated weights gate before up."""

    kernels: ctypes.CDLL
    memory: Tensor  # the packed weight
    kind: int
    columns: int  # N
    inputs: int  # K
    slices: int
    dtype: torch.dtype  # dtype of x and bias
    bias: Tensor | None = None  # [N], or in the order of gated panels
    gated: bool = False  # panels have registers of gate and up by turns

    @staticmethod
    def of(multiply: CppMatmul | CppPackedMatmul | CppGatedMatmul | CppPackedGatedMatmul) -> "PackedSums":
        """Return the sums of `multiply`, with its weight and bias."""
        gated = isinstance(multiply, CppGatedMatmul | CppPackedGatedMatmul)
        if isinstance(multiply, CppPackedMatmul | CppPackedGatedMatmul):
            weight = multiply.weight
            sizes = weight.columns, weight.inputs, weight.slices
            return PackedSums(weight.kernels, weight.memory, weight.kind, *sizes, multiply.dtype, multiply.bias, gated)
        if isinstance(multiply, CppGatedMatmul):
            sizes = 2 * multiply.width, multiply.inputs, 1
        else:
            sizes = multiply.columns, multiply.inputs, multiply.slices
        return PackedSums(multiply.kernels, multiply.packed, DENSE, *sizes, multiply.dtype, multiply.bias, gated)

    @staticmethod
    def of_expert(experts: CppExpertMatmul, number: int) -> "tuple[PackedSums, PackedSums, Tensor | None]":
        """Return the sums of gate and up, and of down without its bias, of expert `number`; and that bias."""
        shape = experts.shape
        (first, first_kind), (second, second_kind) = (stack.weight(number) for stack in experts.stacks)
        gate_up_bias, down_bias = experts.biases[number]
        columns = 2 * shape.width if shape.is_gated else shape.width
        gate_up = PackedSums(
            experts.kernels, first, first_kind, columns, shape.hidden, 1, shape.dtype, gate_up_bias, shape.is_gated
        )
        sizes = shape.hidden, shape.width, shape.slices
        return gate_up, PackedSums(experts.kernels, second, second_kind, *sizes, shape.dtype), down_bias

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self.dtype and x.stride(1) == 1 and x.shape[1] == self.inputs
        kernels = bound(self.kernels) if self.kind == DENSE else declared(self.kernels)
        rows, columns, half = len(x), self.columns, kernels.oarlock_panel() // 2
        if self.gated:  # whole panels: their padding is between gate and up
            columns = -(-columns // (2 * half)) * 2 * half
        y = torch.empty((rows, columns), dtype=torch.float32)
        getattr(kernels, _FUNCTIONS[self.kind])(
            x.data_ptr(), self.memory.data_ptr(), None if self.bias is None else self.bias.data_ptr(), None,
            y.data_ptr(), rows, columns, self.inputs, x.stride(0), columns, Epilogue.FLOAT, ELEMENT_TYPES[self.dtype],
            *((self.kind,) if self.kind in _TAKE_KIND else ()), self.slices,
        )  # fmt: skip
        if not self.gated:
            return y
        both = y.view(rows, -1, 2, half).transpose(1, 2).reshape(rows, 2, -1)
        return both[:, :, : self.columns // 2].reshape(rows, self.columns)
