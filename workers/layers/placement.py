"""Rank, dtype, device and weight formats of a layer, passed to every layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.platform.huge_pages import StagingMemory
from oarlock.workers.quantization.fixed_order import FIXED_ORDER
from oarlock.workers.quantization.formats.weight_format import WeightFormat, WeightFormats, unit_of_width
from oarlock.workers.quantization.method import (
    DenseWeight,
    LinearMethod,
    LinearWeight,
    QuantisedLinearMethod,
    StackedWeight,
    UnquantizedLinearMethod,
    WeightShard,
)
from oarlock.workers.quantization.registry import NONE, Quantization
from oarlock.workers.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank, dtype and device of a layer's weights, and the formats of the weights of linear layers."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    quantization: WeightFormats = NONE
    slices: int = 1  # number of slices, over all ranks, of the inputs that ranks share (`slices_for`)
    staging: StagingMemory = field(default_factory=StagingMemory)
    distributes_experts: bool = False  # ranks hold whole experts; False: each expert is cut along its width

    @property
    def local_slices(self) -> int:
        """Number of slices of one rank's inputs; 1 if the number of ranks does not divide all slices."""
        return self.slices // self.tp.size if self.slices % self.tp.size == 0 else 1

    @property
    def all_reduces_in_float32(self) -> bool:
        """Whether the ranks exchange partial sums before they are rounded.

        On GPUs they are rounded first, which halves the bytes: each rank rounds its partial sum as one rank rounds a
        result.
        """
        return runs_on_host(self.device) or self.quantization is FIXED_ORDER

    def unit_of_width(self, module: str) -> int:
        """Return the unit of an expert's width, of which the length of slices is a multiple. `module`: its down
        projection."""
        return unit_of_width(self.quantization.format_of(module))

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor for weights, which may be kept, or packed and dropped."""
        if self.device.type == "cpu":
            return self.staging.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def load(self, shard: WeightShard, weights: WeightSource) -> LinearWeight:
        """Load one rank's weight of a linear layer. Parts that a checkpoint stores in different formats are loaded one
        by one."""
        formats = self._formats(shard)
        if all(weight_format == formats[0] for weight_format in formats):
            return self._placed(formats[0].method().load(shard, weights, self.empty))
        assert not shard.padding, "only a weight of one part is filled up"
        parts = zip(formats, shard.separate(), strict=True)
        loaded = [self._placed(weight_format.method().load(part, weights, self.empty)) for weight_format, part in parts]
        return StackedWeight(loaded, [part.count for part in shard.parts])

    def load_dequantized(self, shard: WeightShard, weights: WeightSource) -> Tensor:
        """Load one rank's weight [rows, local_inputs] in the model's dtype, in every quantization: it is not rounded at
        load, and written out if the checkpoint stores it quantized."""
        method: LinearMethod = UnquantizedLinearMethod()
        if not isinstance(self.quantization, Quantization):
            stored, *others = self._formats(shard)
            assert not others, "only a weight of one part is written out"
            method = stored.method()
        if isinstance(method, QuantisedLinearMethod):
            weight = method.dequantised(shard, weights, self.empty)
        else:
            weight = method.load(shard, weights, self.empty)
        assert isinstance(weight, DenseWeight), f"{type(method).__name__} reads no dense weight"
        return weight.tensor.to(self.device)

    def weight_bytes(self, shard: WeightShard, bias: bool) -> int:
        """Return the bytes of the weight that `load` returns, and of its bias if `bias`."""
        item, formats = self.dtype.itemsize, self._formats(shard)
        if all(weight_format == formats[0] for weight_format in formats):
            need = formats[0].weight_bytes(shard.rows, shard.local_inputs, item, shard.slices)
        else:
            parts = zip(formats, shard.parts, strict=True)
            need = sum(
                weight_format.weight_bytes(part.count, shard.local_inputs, item, shard.slices)
                for weight_format, part in parts
            )
        return need + bias * shard.rows * item

    def _placed(self, weight: LinearWeight) -> LinearWeight:
        """Move the weight to the memory of the device that runs its matmuls."""
        return weight if runs_on_host(self.device) else weight.on(self.device)

    def _formats(self, shard: WeightShard) -> list[WeightFormat]:
        """Return the formats of the shard's parts, in their order."""
        return [self.quantization.format_of(part.name) for part in shard.parts]


def runs_on_host(device: torch.device) -> bool:
    """Return whether matmuls run in the CPU kernels."""
    return device.type == "cpu"
