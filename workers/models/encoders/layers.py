"""The layers of encoders on one rank. The only communication is the sum after each sublayer's last product."""

from collections.abc import Sequence

from torch import Tensor

from oarlock.workers.attention.bidirectional import attend_both_ways
from oarlock.workers.layers.gelu import gelu
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.norm import LayerNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import rotate
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.quantization.shard import StoredRows, WeightShard
from oarlock.workers.weights.source import WeightSource

Turns = tuple[Tensor, Tensor]  # cos, sin: see `RotaryTable`


class ColumnParallelLinear:
    """[T, inputs] -> [T, local outputs], float32 where the product sums in it: rows of one or several matrices."""

    def __init__(self, parts: tuple[StoredRows, ...], inputs: int, bias: bool, place: Placement) -> None:
        self.place = place
        self.has_bias = bias
        self.weight_shard = WeightShard(parts, inputs, 0, inputs)

    @property
    def weight_bytes(self) -> int:
        return self.place.weight_bytes(self.weight_shard, self.has_bias)

    def load(self, weights: WeightSource) -> None:
        weight = self.place.load(self.weight_shard, weights)
        bias = self.weight_shard.take_bias(weights, self.place.empty) if self.has_bias else None
        self.product = weight.matmul(bias, float32_output=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class EncoderAttention:
    """Projections, rotation where there is one, attention in both directions, output projection."""

    def __init__(self, before: str, spec: EncoderSpec, layer: int, place: Placement) -> None:
        """`before`: the prefix of the layer."""
        names, hidden, size, rank = spec.names.layer, spec.hidden_size, place.tp.size, place.tp.rank
        self.heads = shard_evenly(f"{before}attention", "number of heads", spec.num_heads, size)
        self.head_dim, self.dtype = spec.head_dim, place.dtype
        self.reach = spec.reaches[layer] if spec.reaches else None
        local, stored = self.heads * spec.head_dim, (names.query, names.key, names.value)
        is_one = names.query == names.key
        parts = tuple(
            StoredRows(before + name, 3 * hidden if is_one else hidden, rank * local + number * hidden * is_one, local)
            for number, name in enumerate(stored)
        )
        self.qkv = ColumnParallelLinear(parts, hidden, spec.attention_bias, place)
        self.output = RowParallelLinear(before + names.attention_output, hidden, hidden, spec.attention_bias, place)

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.qkv, self.output]

    def __call__(self, x: Tensor, residual: Tensor, lens: Sequence[int], turns: Turns | None) -> Tensor:
        """`x`, `residual` [T, hidden] -> [T, hidden]."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, self.head_dim)
        q, k, v = qkv.to(self.dtype).unbind(1)
        if turns is not None:
            turned = rotate(qkv[:, :2].flatten(1, 2).contiguous(), *turns, x.dtype)  # [T, 2 * H, D]
            q, k = turned.view(len(x), 2, self.heads, self.head_dim).unbind(1)
        mixed = attend_both_ways(q, k, v, lens, self.reach, self.head_dim**-0.5)
        return self.output(mixed.to(self.dtype), residual)


class EncoderMLP:
    """gelu between two products, or with a gate."""

    def __init__(self, before: str, spec: EncoderSpec, place: Placement) -> None:
        names, inner, size = spec.names.layer, spec.intermediate_size, place.tp.size
        local = shard_evenly(f"{before}mlp", "intermediate size", inner, size)
        halves = 2 if spec.gated else 1
        parts = tuple(
            StoredRows(before + names.mlp_input, halves * inner, half * inner + place.tp.rank * local, local)
            for half in range(halves)
        )
        self.input = ColumnParallelLinear(parts, spec.hidden_size, spec.mlp_bias, place)
        self.output = RowParallelLinear(before + names.mlp_output, inner, spec.hidden_size, spec.mlp_bias, place)
        self.activation, self.gated = spec.activation, spec.gated

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.input, self.output]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Computes the MLP and adds the residual: both [T, hidden] -> [T, hidden]."""
        return self.output(gelu(self.input(x), self.activation, x.dtype, gated=self.gated), residual)


class EncoderLayer:
    """Attention, then MLP, each with a norm after it, or before it."""

    def __init__(self, spec: EncoderSpec, layer: int, place: Placement) -> None:
        before, names = spec.layer_prefix(layer), spec.names.layer
        self.pre_norm = spec.pre_norm
        self.attention = EncoderAttention(before, spec, layer, place)
        self.mlp = EncoderMLP(before, spec, place)
        norms = [
            LayerNorm(before + name, spec.hidden_size, spec.norm_eps, spec.norm_bias, place)
            for name in (names.attention_norm, names.mlp_norm)
        ]
        self.attention_norm = norms[0] if spec.has_attention_norm(layer) else None
        self.mlp_norm = norms[1]

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear | LayerNorm]:
        norm = [] if self.attention_norm is None else [self.attention_norm]
        return [*norm, *self.attention.parts, *self.mlp.parts, self.mlp_norm]

    def __call__(self, hidden: Tensor, lens: Sequence[int], turns: Turns | None) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        norm = self.attention_norm
        if self.pre_norm:
            hidden = self.attention(hidden if norm is None else norm(hidden), hidden, lens, turns)
            return self.mlp(self.mlp_norm(hidden), hidden)
        assert norm is not None
        hidden = norm(self.attention(hidden, hidden, lens, turns))
        return self.mlp_norm(self.mlp(hidden, hidden))
