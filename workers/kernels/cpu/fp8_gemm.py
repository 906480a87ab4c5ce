"""Products with a weight in e4m3 and a scale for each group of inputs, packed for `csrc/gemm/fp8.cpp`."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.element_types import ELEMENT_TYPES
from oarlock.workers.platform.huge_pages import huge_page_empty

FLOAT8 = 5  # the kind of packed weights: `WeightKind` in csrc/gemm/int8.h


class PackedFp8:
    """A weight [N, K] of numbers of 8 bits with a scale for each group of inputs, in the kernel's order."""

    def __init__(
        self, values: Tensor, scales: Tensor, group: int, *, group_in_slices: int, gated: bool = False, slices: int = 1
    ) -> None:
        """`values` float8_e4m3fn [N, K] and `scales` float32 [N, groups], of `group` inputs each, are not kept.

        `slices`: see `LinearWeight.matmul`; in each of them groups of `group_in_slices` inputs begin anew.
        """
        assert values.dtype == torch.float8_e4m3fn and values.stride(1) == 1 and scales.dtype == torch.float32
        self.columns, self.inputs = values.shape
        self.slices = slices
        self.kind = FLOAT8
        self.kernels = _bound(library.library())
        scales = scales.contiguous()
        size = self.kernels.oarlock_fp8_size(self.columns, self.inputs, gated, slices, group_in_slices)
        self.memory = huge_page_empty((size,), torch.uint8)
        self.kernels.oarlock_fp8_pack(
            values.data_ptr(), scales.data_ptr(), self.memory.data_ptr(), self.columns, self.inputs, values.stride(0),
            gated, slices, group_in_slices, scales.shape[1], group,
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor:
        """y [T, N], or with the epilogue of a gate [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_fp8_gemm(
            x.data_ptr(), self.memory.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], self.columns, self.inputs,
            x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.slices,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` int64 [T] times their scales: [T, inputs]. Not of a gated weight."""
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_fp8_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype],
        )  # fmt: skip
        return out


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions for these products declared."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    for name, result, arguments in (
        ("oarlock_fp8_size", number, [number, number, flag, number, number]),
        ("oarlock_fp8_pack", None, [*[pointer] * 3, *[number] * 3, flag, *[number] * 4]),
        ("oarlock_fp8_gemm", None, [*[pointer] * 5, *[number] * 5, flag, flag, number]),
        ("oarlock_fp8_rows", None, [*[pointer] * 3, number, number, flag]),
        ("oarlock_panel", number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
