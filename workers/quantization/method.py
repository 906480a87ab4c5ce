"""The linear method: it reads a layer's weight, which gives the product, whatever form it is stored or multiplied in.

Named as in vLLM: a method creates and loads a layer's weight, and the product that the weight gives applies it. Here
are the interface and the plain weights: in the dtype that the model computes in, stored so or quantised and written out
at load, and several weights of different forms one above the other, each multiplied by itself.
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

# An uninitialised tensor of the given lengths, in the dtype and on the device of the model's weights.
Empty = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows `first` to `first + count` of the stored matrix `{name}.weight`, which has `rows` of them."""

    name: str
    rows: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A rank's weight [rows, local_inputs]: rows of one or several stored matrices, and of each row a slice."""

    parts: tuple[StoredRows, ...]
    inputs: int  # of the whole model
    first_input: int
    local_inputs: int
    fused: str | None = None  # under which a checkpoint may store all parts as one matrix
    padding: int = 0  # rows of zeros after the last part
    slices: int = 1  # of this rank's inputs: see `LinearWeight.matmul`

    @property
    def rows(self) -> int:
        return sum(part.count for part in self.parts) + self.padding

    @property
    def all_slices(self) -> int:
        """Number of slices of the whole model's inputs."""
        return self.slices * (self.inputs // self.local_inputs)

    def separate(self) -> "list[WeightShard]":
        """Shards of one part each."""
        return [replace(self, parts=(part,), fused=None) for part in self.parts]

    def take(self, weights: WeightSource, empty: Empty, *, whole_rows: bool = False) -> Tensor:
        """The weight as it is stored: [rows, local_inputs], or with `whole_rows` [rows, inputs]."""
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
        """Reads the bias: [rows]."""
        into = empty(self.rows)
        into[self.rows - self.padding :] = 0.0
        for name, rows, start, view in self.sources(weights, "bias", into):
            weights.take(f"{name}.bias", view, shape=(rows,), start=start)
        return into

    def sources(self, weights: WeightSource, kind: str, into: Tensor) -> list[tuple[str, int, int, Tensor]]:
        """(name, rows of the stored matrix, first row wanted, where they go) of each part, separate or fused.

        `kind`: by which a fused weight or bias is known, what follows the module's name and a dot.
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
    """A rank's weight [N, K] in memory. It should be dropped after making a product, which may keep another form."""

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        """`float32_output`: results stay float32 where the kernel sums in float32 and would round them.

        `slices`: of equal length into which the inputs are cut, a power of two. Each is summed by itself, in float32 in
        the order of inputs, and the slices are added as in `tree_sum`; then come the bias, the residual and one
        rounding. What a form stores or rounds in groups of inputs, such as rows of x, begins anew at each slice.
        """

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        """The gated product of a weight with the gate's rows first, then as many of up's."""

    def embed(self, ids: Tensor) -> Tensor:
        """Rows `ids` int64 [T] -> [T, K]."""

    def on(self, device: torch.device) -> "LinearWeight":
        """This weight on a CUDA device, multiplied there with inputs that are not rounded."""


class LinearMethod(Protocol):
    """Reader of weights of one form."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        """Read one rank's weight."""


class DenseWeight:
    """`LinearWeight` that is one tensor."""

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
    """`LinearMethod` of ordinary checkpoints."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        return DenseWeight(shard.take(weights, empty))


@runtime_checkable
class QuantisedLinearMethod(LinearMethod, Protocol):
    """A method whose products round inputs."""

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """Reads the weight and writes it out in the model's dtype, with the same numbers at every number of ranks."""


class DequantisingLinearMethod:
    """`LinearMethod` that writes out what another one reads."""

    def __init__(self, method: LinearMethod) -> None:
        assert isinstance(method, QuantisedLinearMethod), f"{type(method).__name__} rounds no inputs"
        self._method = method

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        return self._method.dequantised(shard, weights, empty)


class StackedMatmul:
    """[T, K] -> [T, N], the outputs of `products` side by side."""

    def __init__(self, products: Sequence[Matmul]) -> None:
        self.products = products

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.cat([product(x) for product in self.products], 1)
        return y if residual is None else y + residual


class StackedGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)`: [T, K] -> [T, I], rounded once where the products give float32."""

    def __init__(self, gate: Matmul, up: Matmul, activation: str) -> None:
        self.gate = gate
        self.up = up
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if availability.can_serve(x.device):
            both = torch.cat([self.gate(x), self.up(x)], 1)  # [T, 2 * I], in float32 if one of them is
            return gated(self.activation, x.device)(both).to(x.dtype)
        # torch computes the last few elements of an array with another exponential function, by whose last bits a row
        # would depend on its place and on the number of ranks: in float64, rounding to float32 hides them.
        gate = ACTIVATIONS[self.activation].function(self.gate(x).double()).float()
        return (gate * self.up(x)).to(x.dtype)


class StackedWeight:
    """`LinearWeight` of several weights, whose outputs follow one another."""

    def __init__(self, parts: Sequence[LinearWeight], rows: Sequence[int]) -> None:
        """`rows`: outputs of each part."""
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
