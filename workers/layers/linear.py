"""Column- and row-parallel linear layers. `weight` is [out, in]: column-parallel splits dim 0, row-parallel dim 1.

Constructors take the sizes of the whole model and derive the local ones. A layer uses no memory until `load` reads
exactly its slice. A layer has its name in the checkpoint, for loading and for messages. Only the placement knows the
format of the weights (`quantization/`).
"""

from collections.abc import Set
from typing import Any, Protocol

from torch import Tensor

from oarlock.workers.kernels.cpu.structures import CAdapterPairs
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly, shard_heads
from oarlock.workers.quantization.matmul import activated
from oarlock.workers.quantization.method import StoredRows, WeightShard
from oarlock.workers.weights.source import WeightSource


class KernelPairs(Protocol):
    """The pairs of a layer's adapters, as kernels read them."""

    max_rank: int
    used: Set[int]  # slots with a pair of the layer
    structure: CAdapterPairs


class AdaptedLayer(Protocol):
    """A linear layer in steps in which rows have adapters."""

    @property
    def pairs(self) -> KernelPairs: ...

    @property
    def rows(self) -> Any:
        """Rows of the step that runs that have an adapter of this layer, as `AdaptedRows`; None if there are none."""

    def __call__(self, x: Tensor, rows: Any) -> Tensor:
        """Compute the layer with the updates of `rows`."""


class AdaptedSum(AdaptedLayer, Protocol):
    """A row-parallel layer in steps in which rows have adapters."""

    def __call__(self, x: Tensor, rows: Any, residual: Tensor | None = None) -> Tensor:
        """Compute the layer with the updates of `rows`, and add `residual` before rounding."""

    def total(self, x: Tensor, rows: Any) -> Tensor:
        """Return the same without a residual: [T, outputs], on the host unrounded."""


class QKVParallelLinear:
    """Query, key and value projections as one local matmul: [T, hidden] -> [T, columns].

    The columns are heads * head_dim of queries, kv_heads * head_dim of keys and kv_heads * value_dim of values, each
    if it is projected.
    """

    adapted: AdaptedLayer | None = None  # set if the model serves adapters

    def __init__(
        self,
        name: str,
        hidden: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        placement: Placement,
        *,
        value_dim: int | None = None,
        has_keys: bool = True,
        has_values: bool = True,
    ) -> None:
        """Describe this rank's shard. `name` is the attention module's name, e.g. `model.layers.0.self_attn`.

        `value_dim`: values of one head's value; None: `head_dim`. `has_keys`: whether there are keys and values.
        `has_values`: whether values have a projection of their own, if there are keys.
        """
        self.bias = bias
        self.placement = placement
        self.shard = shard = shard_heads(
            f"{name}.qkv_proj", num_heads, num_kv_heads, placement.tp.rank, placement.tp.size
        )
        q_heads = num_heads, shard.first_head, shard.num_heads
        kv_heads = num_kv_heads, shard.first_kv_head, shard.num_kv_heads

        def rows(part: str, heads: tuple[int, int, int], width: int) -> StoredRows:
            return StoredRows(f"{name}.{part}", *(count * width for count in heads))

        parts = [rows("q_proj", q_heads, head_dim)]  # in the order of their rows in the local matmul
        if has_keys:
            parts.append(rows("k_proj", kv_heads, head_dim))
        if has_keys and has_values:
            parts.append(rows("v_proj", kv_heads, value_dim or head_dim))
        fused = f"{name}.qkv_proj" if has_keys and has_values else None
        self.weight_shard = WeightShard(tuple(parts), hidden, 0, hidden, fused=fused)

    @property
    def weight_bytes(self) -> int:
        return self.placement.weight_bytes(self.weight_shard, self.bias)

    def load(self, weights: WeightSource) -> None:
        weight = self.placement.load(self.weight_shard, weights)
        bias = self.weight_shard.take_bias(weights, self.placement.empty) if self.bias else None
        self.matmul = weight.matmul(bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted(x, rows)
        return self.matmul(x)


class ColumnParallelLinear:
    """Rows of one or several matrices as one local matmul, with an activation if one is given: [T, inputs] -> [T, local
    outputs].
    """

    adapted: AdaptedLayer | None = None  # set if the model serves adapters

    def __init__(
        self,
        parts: tuple[StoredRows, ...],
        inputs: int,
        bias: bool,
        placement: Placement,
        activation: str | None = None,
        *,
        float32_output: bool = True,
        fused: str | None = None,
    ) -> None:
        """Describe this rank's shard.

        `activation`: a key of `PLAIN_ACTIVATIONS` in `quantization/matmul.py`. `float32_output`: the output, or the
        input of the activation, is float32 if the matmul sums in float32. `fused`: name under which a checkpoint may
        store all parts as one matrix.
        """
        self.placement = placement
        self.has_bias = bias
        self.activation = activation
        self.float32_output = float32_output
        self.weight_shard = WeightShard(parts, inputs, 0, inputs, fused=fused)

    @property
    def weight_bytes(self) -> int:
        return self.placement.weight_bytes(self.weight_shard, self.has_bias)

    def load(self, weights: WeightSource) -> None:
        weight = self.placement.load(self.weight_shard, weights)
        bias = self.weight_shard.take_bias(weights, self.placement.empty) if self.has_bias else None
        multiply = weight.matmul(bias, float32_output=self.float32_output)
        self.matmul = multiply if self.activation is None else activated(multiply, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted(x, rows)
        return self.matmul(x)


class GatedParallelLinear:
    """Gate and up projections with their activation: [T, hidden] -> [T, local intermediate]."""

    adapted: AdaptedLayer | None = None  # set if the model serves adapters

    def __init__(
        self, name: str, hidden: int, intermediate: int, bias: bool, activation: str, placement: Placement
    ) -> None:
        """Describe this rank's shard. `name` is the MLP module's name, e.g. `model.layers.0.mlp`."""
        self.bias = bias
        self.activation = activation
        self.placement = placement
        local = shard_evenly(f"{name}.gate_up_proj", "intermediate size", intermediate, placement.tp.size)
        first = placement.tp.rank * local
        parts = tuple(StoredRows(f"{name}.{part}", intermediate, first, local) for part in ("gate_proj", "up_proj"))
        self.weight_shard = WeightShard(parts, hidden, 0, hidden, fused=f"{name}.gate_up_proj")

    @property
    def weight_bytes(self) -> int:
        return self.placement.weight_bytes(self.weight_shard, self.bias)

    def load(self, weights: WeightSource) -> None:
        weight = self.placement.load(self.weight_shard, weights)
        bias = self.weight_shard.take_bias(weights, self.placement.empty) if self.bias else None
        self.matmul = weight.gated_matmul(bias, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted(x, rows)
        return self.matmul(x)


class RowParallelLinear:
    """Linear layer with an all-reduce: [T, local in] -> [T, out], plus the residual if there is one."""

    adapted: AdaptedSum | None = None  # set if the model serves adapters

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool, placement: Placement) -> None:
        self.name = name
        self.placement = placement
        local = shard_evenly(name, "input size", inputs, placement.tp.size)
        rows = (StoredRows(name, outputs, 0, outputs),)
        self.weight_shard = WeightShard(rows, inputs, placement.tp.rank * local, local, slices=placement.local_slices)
        self.has_bias = bias
        self.bias: Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        return self.placement.weight_bytes(self.weight_shard, self.has_bias)

    def load(self, weights: WeightSource) -> None:
        weight = self.placement.load(self.weight_shard, weights)
        self.bias = self.weight_shard.take_bias(weights, self.placement.empty) if self.has_bias else None
        # On the CPU partial sums are exchanged in float32 if the matmul supports it: rounding each of them would add an
        # error that a single rank does not have. The bias, which a single rank adds before rounding, is then added
        # after the all-reduce.
        alone = self.placement.tp.size == 1
        self.matmul = weight.matmul(
            self.bias if alone else None,
            float32_output=not alone and self.placement.all_reduces_in_float32,
            slices=self.placement.local_slices,
        )

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted(x, rows, residual)
        if self.placement.tp.size == 1:
            return self.matmul(x, residual)  # rounded once, after the addition
        total = self._total(x)
        return (total if residual is None else total + residual).to(x.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        """Return the all-reduced output for a caller that adds the residual and then rounds.

        With several ranks it is float32 if the matmul returns float32.
        """
        if self.adapted is not None and (rows := self.adapted.rows) is not None:
            return self.adapted.total(x, rows)
        return self.matmul(x) if self.placement.tp.size == 1 else self._total(x)

    def _total(self, x: Tensor) -> Tensor:
        partial = self.matmul(x)
        total = self.placement.tp.all_reduce(partial.float() if self.placement.slices > 1 else partial)
        return total if self.bias is None else total + self.bias
