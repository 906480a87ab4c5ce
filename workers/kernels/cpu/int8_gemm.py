"""Products with a weight of 8 bits and a scale for each output, packed for the C++ kernel (`csrc/gemm/int8.cpp`)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.element_types import ELEMENT_TYPES
from oarlock.workers.kernels.cpu.gemm import check_slices
from oarlock.workers.kernels.cpu.levels import Level
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.platform.processor import features

INT8, INT8_DOT = 1, 2  # kinds of packed weights: `WeightKind` in csrc/gemm/int8.h
MOST_INPUTS = 65_536  # products of 255 and 127, added up in 32 bits
# Extensions that add four products at once, which no level includes: as Linux names them, and as manuals do.
_DOT_EXTENSIONS = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "asimddp": "dot product extension"}


def _dot_extension(level: Level) -> str:
    if level.machine == "aarch64":
        return "asimddp"
    return "avx512_vnni" if "avx512f" in level.needs else "avx_vnni"


def kind_for(level: Level) -> int:
    """The fastest form that this processor multiplies."""
    return INT8_DOT if _dot_extension(level) in features() else INT8


def instructions(level: Level) -> str:
    """Instruction set that multiplies 8-bit weights at `level` on this processor, as its manual names it."""
    return _DOT_EXTENSIONS[_dot_extension(level)] if kind_for(level) == INT8_DOT else level.vectors


class PackedInt8:
    """A weight [N, K] of whole numbers from -127 to 127 with a scale for each row, in the kernel's order."""

    def __init__(
        self, values: Tensor, scales: Tensor, *, gated: bool = False, kind: int | None = None, slices: int = 1
    ) -> None:
        """`values` int8 [N, K] and `scales` float32 [N] are not kept. `kind`: None for the fastest.

        `slices`: see `LinearWeight.matmul`.
        """
        assert values.dtype == torch.int8 and values.stride(1) == 1 and values.shape[1] <= MOST_INPUTS
        assert scales.dtype == torch.float32 and scales.is_contiguous() and len(scales) == len(values)
        self.kernels = _bound(library.library())
        self.kind = kind_for(library.level()) if kind is None else kind
        self.columns, self.inputs = values.shape
        self.slices = slices
        check_slices(self.inputs, slices)
        size = self.kernels.oarlock_int8_size(self.columns, self.inputs, gated, slices)
        self.memory = huge_page_empty((size,), torch.uint8)
        self.kernels.oarlock_int8_pack(
            values.data_ptr(), scales.data_ptr(), self.memory.data_ptr(), self.columns, self.inputs, values.stride(0),
            gated, self.kind, slices,
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor:
        """y [T, N], or with the epilogue of a gate [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_int8_gemm(
            x.data_ptr(), self.memory.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], self.columns, self.inputs,
            x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.kind, self.slices,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows `ids` int64 [T] times their scales: [T, inputs]. Not of a weight that is gated or in slices."""
        assert self.slices == 1
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_int8_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype],
        )  # fmt: skip
        return out


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions for these products declared."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    for name, result, arguments in (
        ("oarlock_int8_size", number, [number, number, flag, number]),
        ("oarlock_int8_pack", None, [*[pointer] * 3, *[number] * 3, flag, flag, number]),
        ("oarlock_int8_gemm", None, [*[pointer] * 5, *[number] * 5, flag, flag, flag, number]),
        ("oarlock_int8_rows", None, [*[pointer] * 3, number, number, flag]),
        ("oarlock_panel", number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
