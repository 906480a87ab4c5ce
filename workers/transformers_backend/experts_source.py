"""The stacked tensors of a class's experts, read as if each expert had tensors of its own.

`ExpertStack` asks for `experts.3.gate_proj.weight` [width, hidden]; a class has `experts.gate_up_proj` of all experts,
with gate and up in one tensor, and in some classes with rows and columns exchanged.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from oarlock.workers.transformers_backend.class_description import ExpertsModule
from oarlock.workers.weights.source import WeightSource, check_slice

_FLAT = {"gate_proj": "mlp.w1", "up_proj": "mlp.v1", "down_proj": "mlp.w2"}


class StackedSource(WeightSource, Protocol):
    """`WeightSource` with the class's names that reads one expert of a stacked tensor without the others."""

    def take_expert(
        self, name: str, expert: int, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0
    ) -> None:
        """Fill `into` as `take` does, from entry `expert` of the tensor `name` [experts, ...].

        `shape` is the shape of the entry, without the number of experts.
        """


def stacked_names(one: ExpertsModule) -> tuple[str, ...]:
    """Return the names of the class's tensors that hold the experts of `one`."""
    if one.is_flat:
        return tuple(f"{one.module}.{name}" for name in _FLAT.values())
    names = ("gate_up_proj" if one.is_gated else "up_proj", "down_proj")
    kinds = ("", "_bias") if one.has_bias else ("",)
    return tuple(f"{one.module}.{name}{kind}" for kind in kinds for name in names)


class SeparateExperts:
    """`WeightSource` of the experts of one module, by the names that `ExpertStack` uses."""

    def __init__(self, weights: StackedSource, one: ExpertsModule) -> None:
        """Read the experts that `one` describes from `weights`, which has the class's names."""
        self._weights, self._one = weights, one

    def has(self, name: str) -> bool:
        return self._weights.has(self._stacked(*self._parts(name)[1:]))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of one expert's tensor."""
        one, (_, part, kind) = self._one, self._parts(name)
        outputs, inputs = (one.hidden, one.width) if part == "down_proj" else (one.width, one.hidden)
        return (outputs, inputs) if kind == "weight" else (outputs,)

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self._weights.finish(ignorable)

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource.take`. A gate or up projection is only cut along its outputs."""
        assert tuple(shape) == self.shape_of(name), f"{name}: {list(shape)} is not {list(self.shape_of(name))}"
        check_slice(name, into, shape, dim, start)
        one, (expert, part, kind) = self._one, self._parts(name)
        is_down, is_bias = part == "down_proj", kind == "bias"
        assert is_down or dim == 0, f"{name}: its inputs are not cut"
        is_exchanged = not is_bias and (is_down if one.is_flat else one.is_transposed)
        axis = 1 - dim if is_exchanged else dim
        if is_down and list(into.shape) == list(shape):
            axis = 0
        first, count, step, phase = start, into.shape[1 - axis if is_exchanged else axis], 1, 0
        if not is_down and one.is_gated and not one.is_flat:
            phase = int(part == "up_proj")
            if one.is_concatenated:
                first, phase = start + phase * one.width, 0
            else:
                first, step = 2 * start, 2
        entry = self._entry(part, kind)
        if step == 1 and not is_exchanged:
            return self._read(expert, part, kind, into, entry, axis, first)
        found = into.new_empty([count * step if at == axis else length for at, length in enumerate(entry)])
        self._read(expert, part, kind, found, entry, axis, first)
        found = found[phase::step] if axis == 0 else found[:, phase::step]
        into.copy_(found.T if is_exchanged else found)

    def _read(
        self, expert: int, part: str, kind: str, into: Tensor, entry: tuple[int, ...], axis: int, first: int
    ) -> None:
        """Fill `into` with the slice from `first` along `axis` of an expert's entry, whose shape is `entry`."""
        name = self._stacked(part, kind)
        if not self._one.is_flat:
            return self._weights.take_expert(name, expert, into, shape=entry, dim=axis, start=first)
        assert axis == 0, f"{name}: only rows of it are cut"
        shape = (self._one.experts * entry[0], *entry[1:])
        return self._weights.take(name, into, shape=shape, start=expert * entry[0] + first)

    def _entry(self, part: str, kind: str) -> tuple[int, ...]:
        """Return the shape of one expert's entry of the stacked tensor that holds `part`."""
        one = self._one
        if one.is_flat:
            return one.width, one.hidden
        is_down = part == "down_proj"
        outputs = one.hidden if is_down else one.width * (1 + one.is_gated)
        if kind == "bias":
            return (outputs,)
        inputs = one.width if is_down else one.hidden
        return (inputs, outputs) if one.is_transposed else (outputs, inputs)

    def _stacked(self, part: str, kind: str) -> str:
        """Return the name of the class's tensor that holds `part` of all experts."""
        if self._one.is_flat:
            return f"{self._one.module}.{_FLAT[part]}"
        name = "gate_up_proj" if part != "down_proj" and self._one.is_gated else part
        return f"{self._one.module}.{name}{'_bias' if kind == 'bias' else ''}"

    def _parts(self, name: str) -> tuple[int, str, str]:
        """Return the expert, the projection and the kind (weight or bias) of a tensor called `name`."""
        expert, part, kind = name.removeprefix(f"{self._one.module}.").split(".")
        return int(expert), part, kind
