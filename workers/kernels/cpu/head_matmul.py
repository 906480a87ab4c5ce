"""Matmuls with one matrix for each head, packed once for the C++ kernel: one call for all heads.

Packs the matrices and calls the kernel in `csrc/gemm/heads.cpp`, which describes the algorithm.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import gemm, library
from oarlock.workers.kernels.cpu.gemm import ELEMENT_TYPES
from oarlock.workers.kernels.cpu.structures import CHeadMatmul
from oarlock.workers.platform.huge_pages import huge_page_empty


class CppHeadMatmul:
    """`x[:, h] @ weight[h].T` for every head h, summed in float32 and rounded once: [T, heads, K] -> [T, heads, N].

    A row of one head has the bits of `CppMatmul` with the head's matrix.
    """

    def __init__(self, weight: Tensor) -> None:
        """Pack `weight` [heads, N, K], which is not kept."""
        self.heads, self.columns, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.kernels = _bound(library.library(weight.dtype))
        kind = ELEMENT_TYPES[weight.dtype]
        size = self.kernels.oarlock_packed_size(self.columns, self.inputs, False, kind, 1)
        self.packed = huge_page_empty((self.heads, size), weight.dtype)
        for to, one in zip(self.packed, weight, strict=True):
            of_head = one.contiguous()
            sizes = self.columns, self.inputs, of_head.stride(0)
            self.kernels.oarlock_pack(of_head.data_ptr(), to.data_ptr(), *sizes, False, kind, 1)
        self.structure = CHeadMatmul(self.packed.data_ptr(), self.heads, self.columns, self.inputs)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the products of `x`. `out`: where to store them, e.g. some columns of wider rows."""
        assert x.shape[1:] == (self.heads, self.inputs) and x.dtype == self.dtype and x.stride(2) == 1
        shape = len(x), self.heads, self.columns
        y = torch.empty(shape, dtype=x.dtype) if out is None else out
        assert y.shape == shape and y.dtype == x.dtype and y.stride(2) == 1
        self.kernels.oarlock_multiply_heads(
            ctypes.byref(self.structure), x.data_ptr(), *x.stride()[:2], y.data_ptr(), *y.stride()[:2], len(x),
            ELEMENT_TYPES[self.dtype],
        )  # fmt: skip
        return y


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions. Return the library."""
    pointer, number = ctypes.c_void_p, ctypes.c_long
    multiply = gemm.bound(kernels).oarlock_multiply_heads
    multiply.restype = None
    multiply.argtypes = [pointer, pointer, number, number, pointer, number, number, number, ctypes.c_int]
    return kernels
