"""Products with a weight of 4 bits and a scale for each group of inputs, packed for `csrc/gemm/int4.cpp`."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from workers.kernels.cpu import int8_gemm, library
from workers.kernels.cpu.element_types import ELEMENT_TYPES
from workers.kernels.cpu.levels import Level
from workers.platform.huge_pages import huge_page_empty

INT4, INT4_DOT = 3, 4  # kinds of packed weights: `WeightKind` in csrc/gemm/int8.h
GROUP = 32  # inputs that share a scale: `kGroup` in csrc/gemm/int4.cpp


def kind_for(level: Level) -> int:
    """The fastest form that this processor multiplies: it multiplies bytes, as for weights of 8 bits."""
    return INT4_DOT if int8_gemm.kind_for(level) == int8_gemm.INT8_DOT else INT4


class PackedInt4:
    """A weight [N, K] of whole numbers from -8 to 7 with a scale for each `GROUP` inputs, in the kernel's order."""

    def __init__(
        self, values: Tensor, scales: Tensor, *, gated: bool = False, kind: int | None = None, slices: int = 1
    ) -> None:
        """`values` int8 [N, K] and `scales` bfloat16 [N, groups] are not kept. `kind`: None for the fastest.

        `slices`: see `LinearWeight.matmul`.
        """
        assert slices == 1, "the kernel does not add slices up yet"
        self.slices = slices
        assert values.dtype == torch.int8 and values.stride(1) == 1
        assert scales.dtype == torch.bfloat16 and scales.is_contiguous()
        self.columns, self.inputs = values.shape
        assert scales.shape == (self.columns, -(-self.inputs // GROUP))
        self.kernels = _bound(library.library())
        self.kind = kind_for(library.level()) if kind is None else kind
        size = self.kernels.oarlock_int4_size(self.columns, self.inputs, gated)
        self.memory = huge_page_empty((size,), torch.uint8)
        self.kernels.oarlock_int4_pack(
            values.data_ptr(), scales.data_ptr(), self.memory.data_ptr(), self.columns, self.inputs, values.stride(0),
            gated,
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor:
        """y [T, N], or with the epilogue of a gate [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_int4_gemm(
            x.data_ptr(), self.memory.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], self.columns, self.inputs,
            x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.kind,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` int64 [T] times their scales: [T, inputs]. Not of a gated weight."""
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_int4_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype],
        )  # fmt: skip
        return out


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions for these products declared."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    for name, result, arguments in (
        ("oarlock_int4_size", number, [number, number, flag]),
        ("oarlock_int4_pack", None, [*[pointer] * 3, *[number] * 3, flag]),
        ("oarlock_int4_gemm", None, [*[pointer] * 5, *[number] * 5, flag, flag, flag]),
        ("oarlock_int4_rows", None, [*[pointer] * 3, number, number, flag]),
        ("oarlock_panel", number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
