"""Weights in the dtype that the model computes in: stored so, or quantised ones written out and rounded to it once."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.quantization.matmul import GatedMatmul, Matmul, gated_matmul, matmul
from oarlock.workers.quantization.method import Empty, LinearMethod, WeightShard
from oarlock.workers.weights.source import WeightSource


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
