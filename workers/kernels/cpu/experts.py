"""The router of an MoE layer (`csrc/layer/router.cpp`), and its experts in one call (`csrc/gemm/experts.cpp`)."""

import ctypes
from collections.abc import Iterable
from copy import copy
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.gemm import (
    ELEMENT_TYPES,
    GATES,
    PLAIN_EPILOGUES,
    CppGatedMatmul,
    CppMatmul,
    CppPackedGatedMatmul,
    CppPackedMatmul,
    Epilogue,
)
from oarlock.workers.kernels.cpu.structures import CExpert, CExpertAdapters, CExperts, CRouter
from oarlock.workers.platform.huge_pages import huge_page_empty

_LINE = 64  # bytes: packed weights are aligned to cache lines
_DENSE = 0  # the kind of a packed weight in the model's dtype: `WeightKind` in csrc/gemm/int8.h
_ACTIVATIONS = {**GATES, "clamped_swiglu": Epilogue.CLAMPED_GATE}

CppAnyGatedMatmul = CppGatedMatmul | CppPackedGatedMatmul
CppPlainMatmul = CppMatmul | CppPackedMatmul
_pointer, _number, _flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int


class Routing(Protocol):
    """Parameters for choosing experts: the fields of `RouterSpec`."""

    @property
    def top_k(self) -> int: ...
    @property
    def scores(self) -> str: ...
    @property
    def normalised(self) -> bool: ...
    @property
    def least_sum(self) -> float: ...
    @property
    def added_to_sum(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def best_of_group(self) -> int: ...
    @property
    def corrects_logits(self) -> bool: ...
    @property
    def tolerance(self) -> float: ...


class CppRouter:
    """A router with the C++ kernel: computes logits, and chooses experts from them."""

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        spec: Routing | None = None,
    ) -> None:
        """Pack `weight` float32 [experts, hidden], which is not kept, for x of `dtype`.

        `bias` and `correction`: float32 [experts]. `spec`: None if only logits are needed.
        """
        assert weight.dtype == torch.float32
        self.kernels = _declared(library.library(dtype))
        self.dtype = dtype
        self.outputs, hidden = weight.shape
        self.top_k = 1 if spec is None else spec.top_k
        panel = self.kernels.oarlock_panel()
        filled_up = weight.new_zeros((-(-self.outputs // panel) * panel, hidden))
        filled_up[: self.outputs] = weight
        packed = filled_up.view(-1, panel, hidden).transpose(1, 2).contiguous()  # [panels, hidden, panel]
        self._alive = (packed, bias, correction)
        how = (1, 1, 1, 2, False, False, False, False, 1.0, 0.0, 1.0, 0.0)
        if spec is not None:
            how = (
                spec.top_k, spec.groups, spec.top_groups, spec.best_of_group, spec.scores == "sigmoid",
                spec.normalised, spec.corrects_logits, spec.scores == "sparsemixer", spec.least_sum, spec.added_to_sum,
                spec.scale, spec.tolerance,
            )  # fmt: skip
        self.structure = CRouter(packed.data_ptr(), _at(bias), _at(correction), self.outputs, hidden, *how)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of `x` [T, hidden]: float32 [T, experts]."""
        assert x.stride(1) == 1 and x.dtype == self.dtype
        logits = torch.empty((len(x), self.outputs))
        self.kernels.oarlock_router_logits(
            ctypes.addressof(self.structure),
            x.data_ptr(),
            x.stride(0),
            len(x),
            logits.data_ptr(),
            ELEMENT_TYPES[x.dtype],
        )
        return logits

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts from `logits` float32 [T, experts].

        Returns ids int32 [T, k], ascending in each row, and their weights float32 [T, k].
        """
        assert logits.is_contiguous() and logits.dtype == torch.float32
        ids = torch.empty((len(logits), self.top_k), dtype=torch.int32)
        weights = torch.empty((len(logits), self.top_k))
        self.kernels.oarlock_route(
            ctypes.addressof(self.structure), logits.data_ptr(), len(logits), ids.data_ptr(), weights.data_ptr()
        )
        return ids, weights


class Shape(Protocol):
    """Sizes of a rank's experts: the fields of `ExpertsShape`."""

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
    @property
    def weighs_inputs(self) -> bool: ...
    @property
    def is_gated(self) -> bool: ...


def can_stack(first: object, matmul: object) -> bool:
    """Return whether the kernel supports the weights of these matmuls; `first` may be gated."""
    return isinstance(first, CppAnyGatedMatmul | CppPlainMatmul) and isinstance(matmul, CppPlainMatmul)


class _Stack:
    """Packed weights of several experts in huge pages; the weight of one expert often has less than one page."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._weights: list[tuple[Tensor, int]] = []  # memory and kind of each weight
        self.bytes = 0  # size of the first weight

    def weight(self, number: int) -> tuple[Tensor, int]:
        """Return the memory and the kind of a weight."""
        return self._weights[number]

    def add(self, matmul: CppAnyGatedMatmul | CppPlainMatmul) -> tuple[int, int]:
        """Copy the weight of `matmul`. Return its address and kind."""
        is_packed = isinstance(matmul, CppPackedGatedMatmul | CppPackedMatmul)
        packed = (matmul.weight.memory if is_packed else matmul.packed).view(torch.uint8)
        size, number = -(-len(packed) // _LINE) * _LINE, len(self._weights)
        if number == 0:
            self._all = huge_page_empty((self._count, size), torch.uint8)
            self.bytes = size
        fits = size == self.bytes  # experts with another weight format have separate memory
        memory = self._all[number] if fits else huge_page_empty((size,), torch.uint8)
        memory[: len(packed)] = packed
        kind = matmul.weight.kind if is_packed else _DENSE
        self._weights.append((memory, kind))
        return memory.data_ptr(), kind


class CppExpertMatmul:
    """`ExpertMatmul` with the C++ kernel."""

    def __init__(self, shape: Shape, experts: Iterable[tuple[object, object, Tensor | None]]) -> None:
        """Copy the weights of `experts`.

        `experts` yields for each expert, in order: the gated matmul, or a plain one without a gate; the matmul after it
        in `shape.slices`; and the bias [hidden] of the latter. Only their weights are kept. Each is dropped before the
        next one is taken.
        """
        self.shape = shape
        self.kernels = _declared(library.library(shape.dtype))
        gate_up, down = _Stack(shape.count), _Stack(shape.count)
        self.stacks = (gate_up, down)
        self.biases: list[tuple[Tensor | None, Tensor | None]] = []  # of gate and up, and of down, of each expert
        self._experts = (CExpert * max(1, shape.count))()
        number = -1
        for number, (gated, matmul, down_bias) in enumerate(experts):
            kinds = CppAnyGatedMatmul if shape.is_gated else CppPlainMatmul
            assert isinstance(gated, kinds) and isinstance(matmul, CppPlainMatmul)
            first, second = gate_up.add(gated), down.add(matmul)
            self.biases.append((gated.bias, down_bias))
            biases = (_at(gated.bias), _at(down_bias))
            self._experts[number] = CExpert(first[0], second[0], *biases, first[1], second[1])
        assert number + 1 == shape.count
        activations = _ACTIVATIONS if shape.is_gated else PLAIN_EPILOGUES
        self.structure = CExperts(
            ctypes.addressof(self._experts), shape.first, shape.count, shape.hidden, shape.width, shape.slices,
            shape.groups, shape.group or max(1, shape.count), -1, activations[shape.activation], shape.alpha,
            shape.limit, shape.weighs_inputs,
        )  # fmt: skip

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's packed weights, if all have the same format."""
        return self.stacks[0].bytes + self.stacks[1].bytes

    def of_slice(self, number: int) -> "CppExpertMatmul":
        """Return the matmul of slice `number` of every expert's width, with the same weights."""
        one = copy(self)
        one.structure = CExperts.from_buffer_copy(self.structure)
        one.structure.only_slice = number
        return one

    def __call__(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, adapters: CExpertAdapters | None = None
    ) -> Tensor:
        """Compute the experts as `ExpertMatmul` describes. `adapters`: updates of rows of `x`."""
        assert x.stride(1) == 1 and x.dtype == self.shape.dtype and expert_ids.dtype == torch.int32
        assert expert_ids.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
        y = torch.empty((len(x), self.shape.hidden), dtype=torch.float32)
        self.kernels.oarlock_experts(
            ctypes.addressof(self.structure), x.data_ptr(), x.stride(0), expert_ids.data_ptr(), weights.data_ptr(),
            len(x), expert_ids.shape[1], y.data_ptr(), ELEMENT_TYPES[x.dtype],
            None if adapters is None else ctypes.addressof(adapters),
        )  # fmt: skip
        return y


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions for experts. Return the library."""
    for name, result, arguments in (
        (
            "oarlock_experts",
            None,
            [*[_pointer] * 2, _number, *[_pointer] * 2, *[_number] * 2, _pointer, _flag, _pointer],
        ),
        ("oarlock_router_logits", None, [*[_pointer] * 2, *[_number] * 2, _pointer, _flag]),
        ("oarlock_route", None, [*[_pointer] * 2, _number, *[_pointer] * 2]),
        ("oarlock_panel", _number, []),
    ):
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels
