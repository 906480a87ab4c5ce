"""Our matmuls in the place of a class's `nn.Linear`, divided among ranks as the class's plan says.

A part takes inputs of any leading shape and returns results in their dtype. For inputs on the meta device it returns an
empty tensor of this rank's shape, so a look at a class sees what a rank would compute.
"""

from collections.abc import Callable, Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.transformers_backend.observers import Refused
from oarlock.workers.transformers_backend.placement_plan import Division
from oarlock.workers.weights.source import WeightSource


class UsesWeight(Refused):
    """The class computes with the weight or bias of a replaced module itself, so it has to keep that module."""

    def __init__(self, module: str, kind: str, use: str) -> None:
        """Name the replaced `module`, its tensor `kind`, and the attribute or function of the tensor that was used."""
        super().__init__(f"it uses {module}.{kind} itself ({use})")
        self.module = module


class StandIn:
    """The weight or bias of a replaced module, as the class sees it: with a dtype and a device, but without values.

    Any other use raises `UsesWeight`.
    """

    _is_hf_initialized = True  # transformers does not draw values for it, if it computes the buffers beside it

    def __init__(self, module: str, kind: str, placement: Placement) -> None:
        self._module, self._kind = module, kind
        self.dtype = placement.dtype
        self.device = placement.device

    def _used(self, use: str) -> UsesWeight:
        return UsesWeight(self._module, self._kind, use)

    def __getattr__(self, attribute: str) -> Never:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self._used(attribute)

    def __getitem__(self, index: object) -> Never:
        raise self._used("by index")

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Never:
        """Refuse functions and operators of torch that get a stand-in among their arguments."""
        given = (*args, *(kwargs or {}).values())
        # Functions of lists get it inside of a list.
        flat = [one for item in given for one in (item if isinstance(item, list | tuple) else (item,))]
        found = next(one for one in flat if isinstance(one, StandIn))
        raise found._used(getattr(func, "__name__", str(func)))


def not_loaded(x: Tensor) -> Never:
    """Stand for a matmul until weights are there."""
    raise AssertionError(f"no weights were loaded for rows of shape {list(x.shape)}")


class LinearPart(nn.Module):
    """One linear layer on this rank: [..., in_features] -> [..., out_features], both as the class sees them here."""

    has_divided_outputs = False  # other ranks have the others

    def __init__(
        self,
        name: str,
        layer: ColumnParallelLinear | RowParallelLinear,
        in_features: int,
        out_features: int,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.name = name
        self.layer = layer
        self.in_features, self.out_features = in_features, out_features
        self.placement = placement
        self.dtype = placement.dtype
        self.weight = StandIn(name, "weight", placement)
        self.bias = StandIn(name, "bias", placement) if layer.has_bias else None
        self.multiply: Callable[[Tensor], Tensor] = not_loaded  # [T, in_features] -> [T, out_features]

    @property
    def weight_bytes(self) -> int:
        return self.layer.weight_bytes

    def load(self, weights: WeightSource) -> None:
        """Read this rank's part of the weight and the bias."""
        self.layer.load(weights)
        self.multiply = self.loaded()

    def loaded(self) -> Callable[[Tensor], Tensor]:
        """Return the computation of rows [T, in_features], contiguous, with the loaded weight."""
        return self.layer.matmul

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        if shape[-1] != self.in_features or x.dtype is not self.dtype:
            raise mismatch(self.name, x, self.in_features, self.dtype)
        if x.is_meta:
            return x.new_empty((*shape[:-1], self.out_features))
        rows = x.reshape(-1, self.in_features)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        y = self.multiply(rows)
        # A row of tokens [1, T, in_features] is the only shape in most classes, and this is the fastest way to make it.
        return y[None] if len(shape) == 3 and shape[0] == 1 else y.view(*shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the part where a model is printed."""
        return f"{self.name}, {self.in_features} -> {self.out_features}"


class ColumnPart(LinearPart):
    """A linear layer that has all inputs, and computes all its outputs or this rank's."""


class GatheredColumnPart(LinearPart):
    """A linear layer that computes this rank's outputs; then every rank gets all of them."""

    def loaded(self) -> Callable[[Tensor], Tensor]:
        matmul, tp, width = self.layer.matmul, self.placement.tp, self.out_features
        if tp.size == 1:
            return matmul
        return lambda rows: tp.all_gather(matmul(rows)).transpose(0, 1).reshape(-1, width)


class RowPart(LinearPart):
    """A linear layer that has this rank's inputs; the ranks' sums are all-reduced, and the bias is added once."""

    def loaded(self) -> Callable[[Tensor], Tensor]:
        layer = self.layer
        assert isinstance(layer, RowParallelLinear)
        return layer.matmul if self.placement.tp.size == 1 else lambda rows: layer(rows, None)


class SplitRowPart(LinearPart):
    """A linear layer that has all inputs and takes this rank's of them; the ranks' sums are all-reduced."""

    def loaded(self) -> Callable[[Tensor], Tensor]:
        layer, tp = self.layer, self.placement.tp
        assert isinstance(layer, RowParallelLinear)
        if tp.size == 1:
            return layer.matmul
        width = self.in_features // tp.size
        first = tp.rank * width
        return lambda rows: layer(rows[:, first : first + width].contiguous(), None)


def make_linear(name: str, linear: nn.Linear, placement: Placement, division: Division) -> LinearPart:
    """Return this rank's part of `linear`, which has the sizes of the whole model.

    Raises `StartupError`, naming the module, if `division` does not divide a size.
    """
    inputs, outputs, bias = linear.in_features, linear.out_features, linear.bias is not None
    rank, size = placement.tp.rank, placement.tp.size
    if division in (Division.ROW, Division.SPLIT_ROW):
        row = RowParallelLinear(name, inputs, outputs, bias, placement)
        if division is Division.ROW:
            return RowPart(name, row, inputs // size, outputs, placement)
        return SplitRowPart(name, row, inputs, outputs, placement)
    halves = 2 if division is Division.PACKED_COLUMN else 1
    if division is Division.WHOLE:
        rank, size = 0, 1
    local = shard_evenly(name, "output size", outputs, halves * size)
    half = outputs // halves
    parts = tuple(StoredRows(name, outputs, number * half + rank * local, local) for number in range(halves))
    column = ColumnParallelLinear(parts, inputs, bias, placement, float32_output=False)
    if division is Division.GATHERED_COLUMN:
        return GatheredColumnPart(name, column, inputs, outputs, placement)
    assert division in (Division.WHOLE, Division.COLUMN, Division.PACKED_COLUMN), f"{name}: {division}"
    part = ColumnPart(name, column, inputs, halves * local, placement)
    part.has_divided_outputs = size > 1
    return part


def mismatch(name: str, x: Tensor, width: int, dtype: torch.dtype) -> RuntimeError:
    """Return the error for inputs that `nn.Linear` would refuse as well."""
    return RuntimeError(f"{name} takes {width} inputs of {dtype}, but got {x.shape[-1]} of {x.dtype}")
