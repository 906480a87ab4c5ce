"""Matmuls with a weight packed once for the C++ kernel, with the same order of additions for any number of rows.

Packs weights and calls the kernel in `csrc/gemm/gemm.cpp`, which describes the algorithm.
"""

import ctypes
from copy import copy
from enum import IntEnum
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.platform.huge_pages import huge_page_empty

ELEMENT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Epilogue(IntEnum):
    """`gemm::Epilogue`: the operation on the sums of a matmul."""

    PLAIN = 0
    ADD = 1
    FLOAT = 2
    SILU_GATE = 3
    GELU_TANH_GATE = 4
    CLAMPED_GATE = 5
    GELU = 6
    GELU_TANH = 7
    RELU = 8
    RELU_SQUARED = 9


GATES = {"silu": Epilogue.SILU_GATE, "gelu_tanh": Epilogue.GELU_TANH_GATE}
PLAIN_EPILOGUES = {
    "gelu": Epilogue.GELU, "gelu_tanh": Epilogue.GELU_TANH, "relu": Epilogue.RELU, "relu2": Epilogue.RELU_SQUARED,
}  # fmt: skip


def can_serve(weight: Tensor) -> bool:
    """Return whether the kernel supports this weight [N, K], and is loaded."""
    return weight.dtype in ELEMENT_TYPES and weight.device.type == "cpu" and library.why_not(weight.dtype) is None


class CppMatmul:
    """`x @ weight.T + bias (+ residual)`, summed in float32 and rounded once: [T, K] -> [T, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, float32_output: bool = False, slices: int = 1) -> None:
        """Pack `weight` [N, K], which is not kept; `bias` [N]. `float32_output`: results are float32 and not rounded.

        `slices`: see `LinearWeight.matmul`.
        """
        self.kernels = bound(library.library(weight.dtype))
        self.columns, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.slices = slices
        self.packed = _pack(self.kernels, weight, gated=False, slices=slices)
        self.bias = bias
        self.output_dtype = torch.float32 if float32_output else weight.dtype
        self.epilogue = Epilogue.FLOAT if float32_output else Epilogue.PLAIN
        self._bias_at = None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == self.dtype
        rows = x.shape[0]
        y = torch.empty((rows, self.columns), dtype=self.output_dtype)
        epilogue = self.epilogue
        if residual is not None:
            assert residual.is_contiguous() and epilogue == Epilogue.PLAIN
            epilogue = Epilogue.ADD
        self.kernels.oarlock_gemm(
            x.data_ptr(), self.packed.data_ptr(), self._bias_at, None if residual is None else residual.data_ptr(),
            y.data_ptr(), rows, self.columns, self.inputs, x.stride(0), self.columns, epilogue,
            ELEMENT_TYPES[self.dtype], self.slices,
        )  # fmt: skip
        return y

    def as_share(self) -> "CppMatmul":
        """Return this matmul without bias and rounding, for a rank's share of an all-reduce."""
        share = copy(self)
        share.bias, share._bias_at = None, None
        share.epilogue, share.output_dtype = Epilogue.FLOAT, torch.float32
        return share

    def activated(self, activation: str) -> "CppMatmul":
        """Return this matmul followed by an activation, with results in the dtype of x, rounded once."""
        other = copy(self)
        other.epilogue, other.output_dtype = PLAIN_EPILOGUES[activation], self.dtype
        return other

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` int64 [T] of the weight before packing: [T, inputs]. The weight must not have slices."""
        assert self.slices == 1
        out = torch.empty((len(ids), self.inputs), dtype=self.dtype)
        self.kernels.oarlock_unpack_rows(
            self.packed.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[self.dtype],
        )  # fmt: skip
        return out


class CppGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)`, rounded once at the end. `weight` [2 * I, K]: gate above up."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.kernels = bound(library.library(weight.dtype))
        rows, self.inputs = weight.shape
        self.width = rows // 2
        self.dtype = weight.dtype
        self.packed = _pack(self.kernels, weight, gated=True)
        self.bias = None if bias is None else interleaved(self.kernels, bias)
        self.epilogue = GATES[activation]
        self._bias_at = None if self.bias is None else self.bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == self.dtype
        rows = x.shape[0]
        y = torch.empty((rows, self.width), dtype=self.dtype)
        self.kernels.oarlock_gemm(
            x.data_ptr(), self.packed.data_ptr(), self._bias_at, None, y.data_ptr(),
            rows, 2 * self.width, self.inputs, x.stride(0), self.width, self.epilogue, ELEMENT_TYPES[self.dtype], 1,
        )  # fmt: skip
        return y


class PackedWeight(Protocol):
    """A packed and quantized weight [columns, inputs]."""

    kernels: ctypes.CDLL
    kind: int
    columns: int
    inputs: int
    slices: int
    memory: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor: ...

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor: ...


class CppPackedMatmul:
    """`x @ weight.T + bias (+ residual)` with a packed weight: [T, K] -> [T, N]."""

    def __init__(
        self, weight: PackedWeight, dtype: torch.dtype, bias: Tensor | None, *, float32_output: bool = False
    ) -> None:
        """Take `dtype` of x, `bias` [N] and results. `float32_output`: results are float32 and not rounded."""
        self.weight = weight
        self.dtype = dtype
        self.bias = bias
        self.output_dtype = torch.float32 if float32_output else dtype
        self.epilogue = Epilogue.FLOAT if float32_output else Epilogue.PLAIN

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype == self.dtype
        y = torch.empty((x.shape[0], self.weight.columns), dtype=self.output_dtype)
        if residual is None:
            return self.weight.multiply(x, self.bias, None, y, self.epilogue)
        assert residual.is_contiguous() and self.epilogue == Epilogue.PLAIN
        return self.weight.multiply(x, self.bias, residual, y, Epilogue.ADD)

    def as_share(self) -> "CppPackedMatmul":
        """Return this matmul without bias and rounding, for a rank's share of an all-reduce."""
        return CppPackedMatmul(self.weight, self.dtype, None, float32_output=True)

    def activated(self, activation: str) -> "CppPackedMatmul":
        """Return this matmul followed by an activation, with results in the dtype of x, rounded once."""
        other = copy(self)
        other.epilogue, other.output_dtype = PLAIN_EPILOGUES[activation], self.dtype
        return other

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` int64 [T] of the weight, times their scales: [T, inputs]."""
        return self.weight.rows(ids, self.dtype)


class CppPackedGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)` with a packed weight; the result is rounded once."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, bias: Tensor | None, activation: str) -> None:
        """Take a `weight` packed with `gated`; `bias` [2 * I]."""
        self.weight = weight
        self.dtype = dtype
        self.bias = None if bias is None else interleaved(weight.kernels, bias)
        self.epilogue = GATES[activation]

    def __call__(self, x: Tensor) -> Tensor:
        assert x.dtype == self.dtype
        y = torch.empty((x.shape[0], self.weight.columns // 2), dtype=self.dtype)
        return self.weight.multiply(x, self.bias, None, y, self.epilogue)


def _pack(kernels: ctypes.CDLL, weight: Tensor, *, gated: bool, slices: int = 1) -> Tensor:
    assert weight.stride(1) == 1
    columns, inputs = weight.shape
    check_slices(inputs, slices)
    kind = ELEMENT_TYPES[weight.dtype]
    count = kernels.oarlock_packed_size(columns, inputs, gated, kind, slices)
    packed = huge_page_empty((count,), weight.dtype)
    kernels.oarlock_pack(weight.data_ptr(), packed.data_ptr(), columns, inputs, weight.stride(0), gated, kind, slices)
    return packed


def check_slices(inputs: int, slices: int) -> None:
    """Assert that kernels can cut `inputs` into `slices`: a power of two, up to `kMostSlices` in csrc/gemm/slices.h."""
    assert slices in (1, 2, 4, 8) and inputs % slices == 0, f"{inputs} inputs in {slices} slices"


def interleaved(kernels: ctypes.CDLL, bias: Tensor) -> Tensor:
    """Return `bias` [2 * I] in the order of gated panels: registers of gate and up by turns."""
    half, width = len(bias) // 2, kernels.oarlock_panel() // 2
    padded = bias.new_zeros((2, -(-half // width) * width))
    padded[:, :half] = bias.view(2, half)
    return padded.view(2, -1, width).transpose(0, 1).reshape(-1)


@cache
def bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's matmul functions. Return the library."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    for name, result, arguments in (
        ("oarlock_gemm", None, [*[pointer] * 5, *[number] * 5, flag, flag, number]),
        ("oarlock_pack", None, [pointer, pointer, *[number] * 3, flag, flag, number]),
        ("oarlock_packed_size", number, [number, number, flag, flag, number]),
        ("oarlock_unpack_rows", None, [*[pointer] * 3, number, number, flag]),
        ("oarlock_panel", number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
