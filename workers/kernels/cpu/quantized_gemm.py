"""Matmuls with quantized weights, packed once for the C++ kernels in `csrc/gemm/`.

Supported weights: 8 bits with a scale for each output (`int8.cpp`), 4 or 8 bits with a scale for each group of inputs
(`grouped.cpp`), and e4m3 with a scale for each group of inputs (`fp8.cpp`).
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.kernels.cpu.gemm import ELEMENT_TYPES, check_slices
from oarlock.workers.kernels.cpu.structures import CGroupedSource
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.platform.processor import features

INT8, INT8_DOT = 1, 2  # kinds of packed weights: `WeightKind` in csrc/gemm/int8.h
MOST_INPUTS = 65_536  # limit for sums of 255 * 127 in 32 bits
# Extensions that add four products at once, which no ISA level includes. Keys are Linux names, values the manuals'
# names.
_DOT_EXTENSIONS = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "asimddp": "dot product extension"}


def _dot_extension(level: ISALevel) -> str:
    if level.machine == "aarch64":
        return "asimddp"
    return "avx512_vnni" if "avx512f" in level.needs else "avx_vnni"


def int8_kind(level: ISALevel) -> int:
    """Return the fastest kind that this processor supports."""
    return INT8_DOT if _dot_extension(level) in features() else INT8


def instructions(level: ISALevel) -> str:
    """Return the instruction set that multiplies 8-bit weights at `level` on this processor, as its manual names it."""
    return _DOT_EXTENSIONS[_dot_extension(level)] if int8_kind(level) == INT8_DOT else level.vectors


class PackedInt8:
    """A weight [N, K] of integers from -127 to 127 with a scale for each row, in the kernel's order."""

    def __init__(
        self, values: Tensor, scales: Tensor, *, gated: bool = False, kind: int | None = None, slices: int = 1
    ) -> None:
        """Pack `values` int8 [N, K] and `scales` float32 [N], which are not kept. `kind`: None for the fastest.

        `slices`: see `LinearWeight.matmul`.
        """
        assert values.dtype == torch.int8 and values.stride(1) == 1 and values.shape[1] <= MOST_INPUTS
        assert scales.dtype == torch.float32 and scales.is_contiguous() and len(scales) == len(values)
        self.kernels = declared(library.library())
        self.kind = int8_kind(library.isa_level()) if kind is None else kind
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
        """Compute y [T, N], or with a gate epilogue [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_int8_gemm(
            x.data_ptr(), self.memory.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], self.columns, self.inputs,
            x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.kind, self.slices,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows `ids` int64 [T] times their scales: [T, inputs]. The weight must not be gated or have slices."""
        assert self.slices == 1
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_int8_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype],
        )  # fmt: skip
        return out


FLOAT8 = 5  # the kind of packed weights: `WeightKind` in csrc/gemm/int8.h


class PackedFp8:
    """A weight [N, K] of 8-bit floats with a scale for each group of inputs, in the kernel's order."""

    def __init__(
        self, values: Tensor, scales: Tensor, group: int, *, group_in_slices: int, gated: bool = False, slices: int = 1
    ) -> None:
        """Pack `values` float8_e4m3fn [N, K] and `scales` float32 [N, groups], of `group` inputs each. Neither is kept.

        `slices`: see `LinearWeight.matmul`. Groups of `group_in_slices` inputs restart at each slice.
        """
        assert values.dtype == torch.float8_e4m3fn and values.stride(1) == 1 and scales.dtype == torch.float32
        self.columns, self.inputs = values.shape
        self.slices = slices
        self.kind = FLOAT8
        self.kernels = declared(library.library())
        scales = scales.contiguous()
        size = self.kernels.oarlock_fp8_size(self.columns, self.inputs, gated, slices, group_in_slices)
        self.memory = huge_page_empty((size,), torch.uint8)
        self.kernels.oarlock_fp8_pack(
            values.data_ptr(), scales.data_ptr(), self.memory.data_ptr(), self.columns, self.inputs, values.stride(0),
            gated, slices, group_in_slices, scales.shape[1], group,
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor:
        """Compute y [T, N], or with a gate epilogue [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_fp8_gemm(
            x.data_ptr(), self.memory.data_ptr(), None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], self.columns, self.inputs,
            x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.slices,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows `ids` int64 [T] times their scales: [T, inputs]. The weight must not be gated."""
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_fp8_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype],
        )  # fmt: skip
        return out


GROUPED, GROUPED_DOT = 3, 4  # kinds of packed weights: `WeightKind` in csrc/gemm/int8.h
_NOTHING = -1  # input index of padding at the end of a group

_pointer, _number, _flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


def grouped_kind(level: ISALevel) -> int:
    """Return the fastest kind that this processor supports: bytes are multiplied, as with a scale for each output."""
    return GROUPED_DOT if int8_kind(level) == INT8_DOT else GROUPED


class PackedGrouped:
    """A weight [N, K] of integers with scales, and optionally zero points, for groups of inputs."""

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        factors: Tensor,
        group: int,
        *,
        bits: int,
        pieces: Sequence[Sequence[tuple[int, int]]],
        kernel_group: int,
        order: Tensor | None = None,
        is_float: bool = False,
        gated: bool = False,
        kind: int | None = None,
    ) -> None:
        """Pack a weight; none of the arguments is kept.

        weight[n, k] = (values[n, k] + zeros[n, k // group]) * scales[n, k // group] * factors[n]

        `values` int8 [N, K] of 4 or 8 `bits`, `scales` and `zeros` float16 [N, groups], `factors` float32 [N].
        `pieces`: for each slice, the ranges [start, stop) of inputs that are added up together, at most `kernel_group`,
        which is 16 or 32. `order` int64 [K]: input k of the values is input order[k] of x. `is_float`: values are twice
        the 4-bit e2m1 values. `kind`: None for the fastest.
        """
        assert values.dtype == torch.int8 and values.stride(1) == 1 and kernel_group in (16, 32) and bits in (4, 8)
        assert not is_float or (bits == 4 and zeros is None)
        assert scales.dtype == torch.float16 and factors.dtype == torch.float32
        self.columns = len(values)
        self.inputs = values.shape[1] if order is None else int(order.max()) + 1
        self.slices = len(pieces)
        self.kernels = declared(library.library())
        self.kind = grouped_kind(library.isa_level()) if kind is None else kind
        scales, factors = scales.contiguous(), factors.contiguous()
        zeros = None if zeros is None else zeros.contiguous()
        indices = _value_indices(pieces, kernel_group)
        moves = order is not None or indices.numel() != values.shape[1]
        x_indices = _x_indices(indices, order) if moves else None
        source = CGroupedSource(
            values.data_ptr(), scales.data_ptr(), _at(zeros), factors.data_ptr(), indices.data_ptr(), _at(x_indices),
            self.columns, values.stride(0), scales.shape[1], group, self.slices, indices.shape[1],
            bits, kernel_group, gated, is_float, self.kind,
        )  # fmt: skip
        self.memory = huge_page_empty((self.kernels.oarlock_grouped_size(ctypes.byref(source)),), torch.uint8)
        self.kernels.oarlock_grouped_pack(ctypes.byref(source), self.memory.data_ptr())

    def multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, epilogue: int) -> Tensor:
        """Compute y [T, N], or with a gate epilogue [T, N / 2], from x [T, K]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        self.kernels.oarlock_grouped_gemm(
            x.data_ptr(), self.memory.data_ptr(), _at(bias), _at(residual), y.data_ptr(), x.shape[0], self.columns,
            self.inputs, x.stride(0), y.shape[1], epilogue, ELEMENT_TYPES[x.dtype], self.kind, self.slices,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows `ids` int64 [T] of the weight: [T, inputs]. The weight must not be gated."""
        out = torch.empty((len(ids), self.inputs), dtype=dtype)
        self.kernels.oarlock_grouped_rows(
            self.memory.data_ptr(), ids.contiguous().data_ptr(), out.data_ptr(), len(ids), self.inputs,
            ELEMENT_TYPES[dtype], self.kind,
        )  # fmt: skip
        return out


def _value_indices(pieces: Sequence[Sequence[tuple[int, int]]], kernel_group: int) -> Tensor:
    """Return the input index of each packed value: int32 [slices, inputs of a slice as packed].

    Pieces that are shorter than a kernel group are padded, except the last piece of a slice.
    """
    slices = []
    for slice_pieces in pieces:
        found: list[int] = []
        for start, stop in slice_pieces:
            found += [_NOTHING] * (-len(found) % kernel_group)
            found += range(start, stop)
        slices.append(found)
    return torch.tensor(slices, dtype=torch.int32)


def _x_indices(value_indices: Tensor, order: Tensor | None) -> Tensor:
    """Return the input of x for each of `value_indices`: int32 of the same shape. `order`: see `PackedGrouped`."""
    if order is None:
        return value_indices
    moved = order.to(torch.int32)[value_indices.clamp(min=0)]
    return torch.where(value_indices == _NOTHING, _NOTHING, moved)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions for quantized weights. Return the library."""
    for name, result, arguments in (
        ("oarlock_int8_size", _number, [_number, _number, _flag, _number]),
        ("oarlock_int8_pack", None, [*[_pointer] * 3, *[_number] * 3, _flag, _flag, _number]),
        ("oarlock_int8_gemm", None, [*[_pointer] * 5, *[_number] * 5, _flag, _flag, _flag, _number]),
        ("oarlock_int8_rows", None, [*[_pointer] * 3, _number, _number, _flag]),
        ("oarlock_fp8_size", _number, [_number, _number, _flag, _number, _number]),
        ("oarlock_fp8_pack", None, [*[_pointer] * 3, *[_number] * 3, _flag, *[_number] * 4]),
        ("oarlock_fp8_gemm", None, [*[_pointer] * 5, *[_number] * 5, _flag, _flag, _number]),
        ("oarlock_fp8_rows", None, [*[_pointer] * 3, _number, _number, _flag]),
        ("oarlock_grouped_size", _number, [_pointer]),
        ("oarlock_grouped_pack", None, [_pointer, _pointer]),
        ("oarlock_grouped_gemm", None, [*[_pointer] * 5, *[_number] * 5, _flag, _flag, _flag, _number]),
        ("oarlock_grouped_rows", None, [*[_pointer] * 3, _number, _number, _flag, _flag]),
        ("oarlock_panel", _number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
