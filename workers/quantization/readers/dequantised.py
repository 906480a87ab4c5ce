"""Reads quantised weights as numbers of the model's dtype, rounded to it once."""

from typing import Protocol, runtime_checkable

from oarlock.workers.quantization.method import LinearMethod
from oarlock.workers.quantization.shard import Empty, WeightShard
from oarlock.workers.quantization.unquantized import DenseWeight
from oarlock.workers.weights.source import WeightSource


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
