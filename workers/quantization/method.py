"""The linear method: what a layer asks for a product, whatever form its weight is stored or multiplied in.

Named as in vLLM: a method creates and loads a layer's weight, and the product that the weight gives applies it.
"""

from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.quantization.matmul import GatedMatmul, Matmul
from oarlock.workers.quantization.shard import Empty, WeightShard
from oarlock.workers.weights.source import WeightSource


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
