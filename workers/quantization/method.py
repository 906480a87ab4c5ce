"""The linear method: reads a layer's weight in any stored format; the weight creates its matmul.

The name is vLLM's: a method creates and loads a layer's weight, and here the weight's matmul applies it. This module
has the interface and the dense weights, stored in the model's dtype or dequantised at load, and stacks of weights of
different formats, each multiplied by its own kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization.matmul import ACTIVATIONS, GatedMatmul, Matmul, gated, gated_matmul, matmul
from oarlock.workers.weights.source import WeightSource

# Creates an uninitialised tensor of the given lengths, with the dtype and the device of the model's weights.
Empty = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows `first` to `first + count` of the stored matrix `{name}.weight`, which has `rows` rows."""

    name: str
    rows: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A rank's weight [rows, local_inputs]: rows of one or several stored matrices, and a slice of each row."""

    parts: tuple[StoredRows, ...]
    inputs: int  # inputs of the whole model
    first_input: int
    local_inputs: int
    fused: str | None = None  # name under which a checkpoint may store all parts as one matrix
    padding: int = 0  # zero rows after the last part
    slices: int = 1  # slices of this rank's inputs: see `LinearWeight.matmul`

    @property
    def rows(self) -> int:
        return sum(part.count for part in self.parts) + self.padding

    @property
    def all_slices(self) -> int:
        """Number of slices of the whole model's inputs."""
        return self.slices * (self.inputs // self.local_inputs)

    def separate(self) -> "list[WeightShard]":
        """Return a shard for each part."""
        return [replace(self, parts=(part,), fused=None) for part in self.parts]

    def take(self, weights: WeightSource, empty: Empty, *, whole_rows: bool = False) -> Tensor:
        """Return the weight as stored: [rows, local_inputs], or with `whole_rows` [rows, inputs]."""
        cut = not whole_rows and self.local_inputs != self.inputs
        into = empty(self.rows, self.local_inputs if cut else self.inputs)
        into[self.rows - self.padding :] = 0.0
        for name, rows, start, view in self.sources(weights, "weight", into):
            shape = (rows, self.inputs)
            if cut:
                assert (start, len(view)) == (0, rows), f"{name} is cut along both dimensions"
                weights.take(f"{name}.weight", view, shape=shape, dim=1, start=self.first_input)
            else:
                weights.take(f"{name}.weight", view, shape=shape, start=start)
        return into

    def take_bias(self, weights: WeightSource, empty: Empty) -> Tensor:
        """Read the bias: [rows]."""
        into = empty(self.rows)
        into[self.rows - self.padding :] = 0.0
        for name, rows, start, view in self.sources(weights, "bias", into):
            weights.take(f"{name}.bias", view, shape=(rows,), start=start)
        return into

    def sources(self, weights: WeightSource, kind: str, into: Tensor) -> list[tuple[str, int, int, Tensor]]:
        """Return (name, rows of the stored matrix, first row to read, view of `into`) of each part, separate or fused.

        `kind`: suffix of the tensor after the module's name and a dot, by which a fused weight or bias is recognised.
        """
        fused = self.fused if self.fused and weights.has(f"{self.fused}.{kind}") else None
        all_rows = sum(part.rows for part in self.parts)
        found = []
        row = above = 0
        for part in self.parts:
            view = into[row : row + part.count]
            separate = (part.name, part.rows, part.first, view)
            found.append(separate if fused is None else (fused, all_rows, above + part.first, view))
            row += part.count
            above += part.rows
        return found


class LinearWeight(Protocol):
    """A rank's weight [N, K] in memory. Drop it after creating a matmul, which may keep another layout."""

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        """Return the matmul of this weight.

        `float32_output`: results stay float32 if the kernel sums in float32 and would otherwise round them.

        `slices`: number of equal slices of the inputs, a power of two. Each slice is summed separately, in float32 and
        in the order of inputs, and the slices are added as in `tree_sum`; then come the bias, the residual and one
        rounding. Inputs that share a stored scale, or are rounded together like a row of x, start anew at each slice.
        """

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        """Return the gated matmul of a weight with the gate's rows first, then an equal number of rows of up."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return rows `ids`, int64 [T], of the weight: [T, K]."""

    def on(self, device: torch.device) -> "LinearWeight":
        """Return this weight on a CUDA device. Its matmuls there do not round their inputs."""


class LinearMethod(Protocol):
    """Reader of weights of one format."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        """Read one rank's weight."""


class DenseWeight:
    """`LinearWeight` of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # [N, K]

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        return matmul(self.tensor, bias, float32_output=float32_output, slices=slices)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        return gated_matmul(self.tensor, bias, activation)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensor)

    def on(self, device: torch.device) -> "DenseWeight":
        return DenseWeight(self.tensor.to(device))


class UnquantizedLinearMethod:
    """`LinearMethod` of unquantised checkpoints."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        return DenseWeight(shard.take(weights, empty))


@runtime_checkable
class QuantisedLinearMethod(LinearMethod, Protocol):
    """Linear method whose matmuls round their inputs."""

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """Read the weight and write it out in the model's dtype. The values do not depend on the number of ranks."""


class DequantisingLinearMethod:
    """`LinearMethod` that dequantises the weights another method reads."""

    def __init__(self, method: LinearMethod) -> None:
        assert isinstance(method, QuantisedLinearMethod), f"{type(method).__name__} rounds no inputs"
        self._method = method

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        return self._method.dequantised(shard, weights, empty)


class StackedMatmul:
    """Outputs of `matmuls` concatenated: [T, K] -> [T, N]."""

    def __init__(self, matmuls: Sequence[Matmul]) -> None:
        self.matmuls = matmuls

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.cat([matmul(x) for matmul in self.matmuls], 1)
        return y if residual is None else y + residual


class StackedGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)`: [T, K] -> [T, I], rounded once if the matmuls return float32."""

    def __init__(self, gate: Matmul, up: Matmul, activation: str) -> None:
        self.gate = gate
        self.up = up
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if availability.can_serve(x.device):
            both = torch.cat([self.gate(x), self.up(x)], 1)  # [T, 2 * I], in float32 if either part is
            return gated(self.activation, x.device)(both).to(x.dtype)
        # torch computes the last few elements of an array with another exponential function, whose last bits would make
        # a row depend on its position and on the number of ranks. Computing in float64 and rounding to float32 hides
        # the difference.
        gate = ACTIVATIONS[self.activation].function(self.gate(x).double()).float()
        return (gate * self.up(x)).to(x.dtype)


class StackedWeight:
    """`LinearWeight` of several weights whose outputs are concatenated."""

    def __init__(self, parts: Sequence[LinearWeight], rows: Sequence[int]) -> None:
        """Stack `parts`; `rows` has the outputs of each part."""
        self.parts = parts
        self.rows = rows

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        return StackedMatmul(
            [
                part.matmul(own, float32_output=float32_output, slices=slices)
                for part, own in zip(self.parts, self._biases(bias), strict=True)
            ]
        )

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        gate, up = (
            part.matmul(own, float32_output=True) for part, own in zip(self.parts, self._biases(bias), strict=True)
        )
        return StackedGatedMatmul(gate, up, activation)

    def embed(self, ids: Tensor) -> Tensor:
        raise AssertionError("an embedding has one part")

    def on(self, device: torch.device) -> "StackedWeight":
        return StackedWeight([part.on(device) for part in self.parts], self.rows)

    def _biases(self, bias: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * len(self.parts) if bias is None else [own.clone() for own in bias.split(list(self.rows))]
