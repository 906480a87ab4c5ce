"""Weights of different forms one above the other, as one weight: each is multiplied by itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization.matmul import ACTIVATIONS, GatedMatmul, Matmul, gated
from oarlock.workers.quantization.method import LinearWeight


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
