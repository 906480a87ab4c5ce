"""The experts of a mixture in one call: `csrc/gemm/experts.cpp` multiplies the packed weights of those in use."""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import (
    ELEMENT_TYPES,
    GATES,
    CppGatedMatmul,
    CppMatmul,
    CppPackedGatedMatmul,
    CppPackedMatmul,
    Epilogue,
)
from oarlock.workers.platform.huge_pages import huge_page_empty

_LINE = 64  # bytes: a packed weight begins at a cache line
_DENSE = 0  # the kind of a packed weight in the model's dtype: `WeightKind` in csrc/gemm/int8.h
_ACTIVATIONS = {**GATES, "clamped_swiglu": Epilogue.CLAMPED_GATE}

GatedProduct = CppGatedMatmul | CppPackedGatedMatmul
Product = CppMatmul | CppPackedMatmul
_pointer, _number, _flag, _real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class CExpert(ctypes.Structure):
    """`Expert` in csrc/gemm/experts.h."""

    _fields_ = (
        ("gate_up", _pointer),
        ("down", _pointer),
        ("gate_up_bias", _pointer),
        ("down_bias", _pointer),
        ("gate_up_kind", _flag),
        ("down_kind", _flag),
    )


class CExperts(ctypes.Structure):
    """`Experts` in csrc/gemm/experts.h."""

    _fields_ = (
        ("of", _pointer),
        ("first", _number),
        ("count", _number),
        ("hidden", _number),
        ("width", _number),
        ("slices", _number),
        ("groups", _number),
        ("group", _number),
        ("activation", _flag),
        ("alpha", _real),
        ("limit", _real),
    )


class Shape(Protocol):
    """Sizes of a rank's experts, as `ExpertsShape` has them."""

    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def slices(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...


def can_stack(gated: object, product: object) -> bool:
    """Whether the kernel multiplies the weights of these products."""
    return isinstance(gated, GatedProduct) and isinstance(product, Product)


class _Stack:
    """Packed weights one after the other in huge pages: one expert alone often has less than one of these."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._alive: list[Tensor] = []

    def add(self, product: GatedProduct | Product) -> tuple[int, int]:
        """The address and the kind of the product's weight, which is copied."""
        is_packed = isinstance(product, CppPackedGatedMatmul | CppPackedMatmul)
        packed = (product.weight.memory if is_packed else product.packed).view(torch.uint8)
        size, number = -(-len(packed) // _LINE) * _LINE, len(self._alive)
        if number == 0:
            self._all = huge_page_empty((self._count, size), torch.uint8)
        fits = size == self._all.shape[1]  # experts of another form have memory of their own
        place = self._all[number] if fits else huge_page_empty((size,), torch.uint8)
        place[: len(packed)] = packed
        self._alive.append(place)
        return place.data_ptr(), product.weight.kind if is_packed else _DENSE


class CppExpertMatmul:
    """`ExpertMatmul` by the C++ kernel."""

    def __init__(self, shape: Shape, experts: Iterable[tuple[object, object, Tensor | None]]) -> None:
        """`experts`: of each, in order, the gated product, the one after it in `shape.slices`, and the latter's bias
        [hidden]; only their weights are kept. Each is dropped before the next one is taken."""
        self.shape = shape
        self.kernels = _declared(library.library(shape.dtype))
        gate_up, down = _Stack(shape.count), _Stack(shape.count)
        self._alive: list[object] = [gate_up, down]
        self._of = (CExpert * max(1, shape.count))()
        number = -1
        for number, (gated, product, down_bias) in enumerate(experts):
            assert isinstance(gated, GatedProduct) and isinstance(product, Product)
            first, second = gate_up.add(gated), down.add(product)
            self._alive += (gated.bias, down_bias)
            self._of[number] = CExpert(first[0], second[0], _at(gated.bias), _at(down_bias), first[1], second[1])
        assert number + 1 == shape.count
        self.experts = CExperts(
            ctypes.addressof(self._of), shape.first, shape.count, shape.hidden, shape.width, shape.slices, shape.groups,
            shape.group or max(1, shape.count), _ACTIVATIONS[shape.activation], shape.alpha, shape.limit,
        )  # fmt: skip

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        assert x.stride(1) == 1 and x.dtype == self.shape.dtype and expert_ids.dtype == torch.int32
        assert expert_ids.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
        y = torch.empty((len(x), self.shape.hidden), dtype=torch.float32)
        self.kernels.oarlock_experts(
            ctypes.addressof(self.experts), x.data_ptr(), x.stride(0), expert_ids.data_ptr(), weights.data_ptr(),
            len(x), expert_ids.shape[1], y.data_ptr(), ELEMENT_TYPES[x.dtype],
        )  # fmt: skip
        return y


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its function for experts declared."""
    function = kernels.oarlock_experts
    function.restype, function.argtypes = (
        None,
        [_pointer, _pointer, _number, _pointer, _pointer, *[_number] * 2, _pointer, _flag],
    )
    return kernels
