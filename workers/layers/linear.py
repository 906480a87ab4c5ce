"""Column- and row-parallel linear layers. `weight` is [out, in]: column-parallel splits dim 0, row-parallel dim 1.

Constructors take the sizes of the whole model and derive the local ones. A layer holds no memory until `load` reads
exactly its slice. Its name is the checkpoint's, for loading and for messages.
"""

from torch import Tensor

from workers.layers.matmul import gated_matmul, matmul
from workers.layers.placement import Placement
from workers.layers.sharding import shard_evenly, shard_heads
from workers.weights.source import WeightSource


class QKVParallelLinear:
    """Query, key and value projections as one local product: [T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]."""

    def __init__(
        self, name: str, hidden: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, place: Placement
    ) -> None:
        """`name` is the attention module's, e.g. `model.layers.0.self_attn`."""
        self.name = name
        self.hidden = hidden
        self.bias = bias
        self.place = place
        self.shard = shard_heads(f"{name}.qkv_proj", num_heads, num_kv_heads, place.tp.rank, place.tp.size)
        kv_rows = num_kv_heads * head_dim
        # (name, rows of the whole tensor, first row here, rows here), in the order of the local product
        self.parts = [
            ("q_proj", num_heads * head_dim, self.shard.first_head * head_dim, self.shard.num_heads * head_dim),
            ("k_proj", kv_rows, self.shard.first_kv_head * head_dim, self.shard.num_kv_heads * head_dim),
            ("v_proj", kv_rows, self.shard.first_kv_head * head_dim, self.shard.num_kv_heads * head_dim),
        ]
        self.rows = sum(part[3] for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return self.rows * (self.hidden + self.bias) * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        weight = self.place.empty(self.rows, self.hidden)
        _take_stacked(weights, weight, self.name, "qkv_proj", "weight", self.parts)
        bias = None
        if self.bias:
            bias = self.place.empty(self.rows)
            _take_stacked(weights, bias, self.name, "qkv_proj", "bias", self.parts)
        self.product = matmul(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class GatedParallelLinear:
    """Gate and up projections with their activation: [T, hidden] -> [T, local intermediate]."""

    def __init__(
        self, name: str, hidden: int, intermediate: int, bias: bool, activation: str, place: Placement
    ) -> None:
        """`name` is the MLP module's, e.g. `model.layers.0.mlp`."""
        self.name = name
        self.hidden = hidden
        self.intermediate = intermediate
        self.bias = bias
        self.activation = activation
        self.place = place
        self.local = shard_evenly(f"{name}.gate_up_proj", "intermediate size", intermediate, place.tp.size)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.local * (self.hidden + self.bias) * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        first = self.place.tp.rank * self.local
        parts = [(part, self.intermediate, first, self.local) for part in ("gate_proj", "up_proj")]
        weight = self.place.empty(2 * self.local, self.hidden)
        _take_stacked(weights, weight, self.name, "gate_up_proj", "weight", parts)
        bias = None
        if self.bias:
            bias = self.place.empty(2 * self.local)
            _take_stacked(weights, bias, self.name, "gate_up_proj", "bias", parts)
        self.product = gated_matmul(weight, bias, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class RowParallelLinear:
    """[T, local in] -> [T, out]: the product summed over ranks by one all-reduce, plus the residual if there is one."""

    def __init__(self, name: str, inputs: int, outputs: int, bias: bool, place: Placement) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.place = place
        self.local = shard_evenly(name, "input size", inputs, place.tp.size)
        # The ranks' results are added, so only one rank adds the bias.
        self.bias = bias and place.tp.rank == 0
        self.bias_elsewhere = bias and place.tp.rank != 0

    @property
    def weight_bytes(self) -> int:
        return self.outputs * (self.local + self.bias) * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        weight = self.place.empty(self.outputs, self.local)
        shape = (self.outputs, self.inputs)
        weights.take(f"{self.name}.weight", weight, shape=shape, dim=1, start=self.place.tp.rank * self.local)
        bias = self.place.empty(self.outputs) if self.bias else None
        if bias is not None:
            weights.take(f"{self.name}.bias", bias, shape=(self.outputs,))
        elif self.bias_elsewhere:
            weights.take(f"{self.name}.bias", self.place.empty(0), shape=(self.outputs,))
        # Partial sums are exchanged in float32 where the product supports it: rounding each of them would add an error
        # that a single rank does not have.
        self.product = matmul(weight, bias, float32_output=self.place.tp.size > 1)

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.place.tp.size == 1:
            return self.product(x, residual)  # rounded once, after the addition
        total = self.place.tp.all_reduce(self.product(x))
        if residual is not None:
            total = total.add_(residual)
        return total.to(x.dtype)


def _take_stacked(
    weights: WeightSource, into: Tensor, module: str, fused: str, kind: str, parts: list[tuple[str, int, int, int]]
) -> None:
    """Fill `into` with slices along dim 0 of several parts, stored as separate tensors or as one fused tensor.

    `parts`: (name, rows of the whole part, first row wanted, rows wanted).
    """
    columns = tuple(into.shape[1:])
    fused_name = f"{module}.{fused}.{kind}"
    is_fused = weights.has(fused_name)
    all_rows = sum(part[1] for part in parts)
    row = above = 0
    for name, rows, first, wanted in parts:
        view = into[row : row + wanted]
        if is_fused:
            weights.take(fused_name, view, shape=(all_rows, *columns), start=above + first)
        else:
            weights.take(f"{module}.{name}.{kind}", view, shape=(rows, *columns), start=first)
        row += wanted
        above += rows
