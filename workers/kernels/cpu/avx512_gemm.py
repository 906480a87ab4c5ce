"""bfloat16 products by the C++ kernel in `gemm.cpp`, with the same order of additions for any number of rows.

Packs weights for the kernel and calls it.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from workers.kernels.cpu import library

_PANEL = 32  # outputs per panel of the packed weight
_AHEAD = 2048  # bytes that the kernel prefetches ahead, also past the end of the last panel
_PLAIN, _ADD, _FLOAT, _SILU, _GELU_TANH = range(5)
_GATES = {"silu": _SILU, "gelu_tanh": _GELU_TANH}


def can_serve(weight: Tensor) -> bool:
    """Whether the kernel supports this weight [N, K], and could be built here."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.shape[1] % 2 == 0  # inputs are taken in pairs
        and library.provides("oarlock_gemm")
    )


class Avx512Matmul:
    """`x @ weight.T + bias (+ residual)`, summed in float32 and rounded once: bfloat16 [T, K] -> [T, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, float32_output: bool = False) -> None:
        """`weight` [N, K], not kept; `bias` [N]. `float32_output`: results are float32 and not rounded."""
        self.columns, self.inputs = weight.shape
        self.packed = _pack(weight, gated=False)
        self.bias = bias
        self.float32_output = float32_output
        self._bias_at = None if bias is None else bias.data_ptr()
        self._gemm = _kernel()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == torch.bfloat16
        rows = x.shape[0]
        y = torch.empty((rows, self.columns), dtype=torch.float32 if self.float32_output else torch.bfloat16)
        epilogue = _FLOAT if self.float32_output else _PLAIN
        if residual is not None:
            assert residual.is_contiguous() and not self.float32_output
            epilogue = _ADD
        self._gemm(
            x.data_ptr(), self.packed.data_ptr(), self._bias_at, None if residual is None else residual.data_ptr(),
            y.data_ptr(), rows, self.columns, self.inputs, x.stride(0), self.columns, epilogue,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` int64 [T] of the weight before packing: bfloat16 [T, inputs]."""
        out = torch.empty((len(ids), self.inputs), dtype=torch.bfloat16)
        library.library().oarlock_unpack_rows(
            ctypes.c_void_p(self.packed.data_ptr()), ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p(out.data_ptr()),
            ctypes.c_long(len(ids)), ctypes.c_long(self.inputs),
        )  # fmt: skip
        return out


class Avx512GatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)`, rounded once at the end. `weight` [2 * I, K]: gate above up."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        rows, self.inputs = weight.shape
        self.width = rows // 2
        self.packed = _pack(weight, gated=True)
        self.bias = None if bias is None else _interleaved(bias)
        self.epilogue = _GATES[activation]
        self._bias_at = None if self.bias is None else self.bias.data_ptr()
        self._gemm = _kernel()

    def __call__(self, x: Tensor) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == torch.bfloat16
        rows = x.shape[0]
        y = torch.empty((rows, self.width), dtype=torch.bfloat16)
        self._gemm(
            x.data_ptr(), self.packed.data_ptr(), self._bias_at, None, y.data_ptr(),
            rows, 2 * self.width, self.inputs, x.stride(0), self.width, self.epilogue,
        )  # fmt: skip
        return y


def _pack(weight: Tensor, gated: bool) -> Tensor:
    columns, inputs = weight.shape
    panels = -(-columns // 2 // (_PANEL // 2)) if gated else -(-columns // _PANEL)
    packed = torch.empty(panels * _PANEL * inputs + _AHEAD // 2, dtype=torch.bfloat16)
    weight = weight.contiguous()
    library.library().oarlock_pack(
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(packed.data_ptr()),
        ctypes.c_long(columns), ctypes.c_long(inputs), ctypes.c_int(gated),
    )  # fmt: skip
    return packed


def _interleaved(bias: Tensor) -> Tensor:
    """`bias` [2 * I] in the order of gated panels: sixteen of the gate, sixteen of up, and so on."""
    half = len(bias) // 2
    padded = bias.new_zeros((2, -(-half // 16) * 16))
    padded[:, :half] = bias.view(2, half)
    return padded.view(2, -1, 16).transpose(0, 1).reshape(-1)


@cache
def _kernel():
    gemm = library.library().oarlock_gemm
    pointer, number = ctypes.c_void_p, ctypes.c_long
    gemm.argtypes = [*[pointer] * 5, *[number] * 5, ctypes.c_int]
    gemm.restype = None
    return gemm
