"""An encoder on one rank: embeddings, layers whose tokens attend in both directions, and a classification head.

Keeps no state between calls, and no keys or values: a step has each text completely. Texts are computed one by one, and
long texts with local attention in blocks at fixed positions, so that a text's bits do not depend on other texts in the
step. The only communication is the all-reduce after each sublayer. The head is small, and every rank has all of it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.layers.embedding import VocabParallelEmbedding
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import LayerNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import RotaryTable, rotate
from oarlock.workers.layers.sharding import shard_evenly, slices_for
from oarlock.workers.models.encoders.encoder_spec import ClassifierSpec, EncoderSpec
from oarlock.workers.models.encoders.registry import is_ignorable
from oarlock.workers.platform import processor
from oarlock.workers.quantization.matmul import PLAIN_ACTIVATIONS
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.weights.source import WeightSource

_BLOCK = 512  # queries per block in layers with local attention


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], reach: int | None, scale: float
) -> Tensor:
    """Compute attention in both directions within each text: `q`, `k`, `v` [T, H, D] -> [T, H * D] of `q`'s dtype.

    `lens`: number of tokens of each text. `reach`: number of tokens on each side that a token attends to, or None for
    all. `scale`: factor of the scores.
    """
    mixed = torch.empty_like(q)
    # Matmuls of 16-bit values are summed in float32. If the processor would emulate them, float32 values are
    # multiplied.
    dtype = q.dtype if q.device.type != "cpu" or processor.here().multiplies(_name(q.dtype)) else torch.float32
    start = 0
    for length in lens:
        text = slice(start, start + length)
        # [1, H, n, D], as torch's attention expects it
        parts = [x[text].to(dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        mixed[text] = _of_text(*parts, reach, scale).squeeze(0).transpose(0, 1)
        start += length
    return mixed.flatten(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_text(q: Tensor, k: Tensor, v: Tensor, reach: int | None, scale: float) -> Tensor:
    """Compute attention within one text: `q`, `k`, `v` [1, H, n, D] -> [1, H, n, D]."""
    length = q.shape[2]
    if reach is None or reach >= length - 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    places = torch.arange(length, device=q.device)
    blocks = []
    for start in range(0, length, _BLOCK):
        own = slice(start, min(start + _BLOCK, length))
        near = slice(max(0, start - reach), min(own.stop + reach, length))
        mask = (places[own, None] - places[None, near]).abs() <= reach  # [block, keys]
        blocks.append(
            F.scaled_dot_product_attention(q[:, :, own], k[:, :, near], v[:, :, near], attn_mask=mask, scale=scale)
        )
    return torch.cat(blocks, 2)


TANH_GELU = "gelu_tanh"  # otherwise exact gelu with the error function


def gelu(x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Return gelu of `x` [T, I], of `dtype` or float32, in `dtype`.

    With `gated`, `x` is [T, 2 * I], and the first half of a row is the gate of the second.
    """
    if elementwise.can_serve(dtype, x.device):
        return elementwise.gelu(x, dtype, gated=gated, is_tanh=activation == TANH_GELU)
    return gelu_with_torch(x, activation, dtype, gated=gated)


def gelu_with_torch(x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Compute `gelu` with torch operations, for every device; tests compare the kernel with it."""
    gate, up = x.float().chunk(2, 1) if gated else (x.float(), None)
    y = PLAIN_ACTIVATIONS[activation](gate)
    return (y if up is None else y * up).to(dtype)


Angles = tuple[Tensor, Tensor]  # cos, sin: see `RotaryTable`


class EncoderAttention:
    """Projections, rotation if there is one, attention in both directions, output projection."""

    def __init__(self, before: str, spec: EncoderSpec, layer: int, placement: Placement) -> None:
        """Describe this rank's shard. `before`: the prefix of the layer."""
        names, hidden, size, rank = spec.names.layer, spec.hidden_size, placement.tp.size, placement.tp.rank
        self.heads = shard_evenly(f"{before}attention", "number of heads", spec.num_heads, size)
        self.head_dim, self.dtype = spec.head_dim, placement.dtype
        self.reach = spec.reaches[layer] if spec.reaches else None
        local, stored = self.heads * spec.head_dim, (names.query, names.key, names.value)
        is_one = names.query == names.key
        parts = tuple(
            StoredRows(before + name, 3 * hidden if is_one else hidden, rank * local + number * hidden * is_one, local)
            for number, name in enumerate(stored)
        )
        self.qkv = ColumnParallelLinear(parts, hidden, spec.attention_bias, placement)
        self.output = RowParallelLinear(before + names.attention_output, hidden, hidden, spec.attention_bias, placement)

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.qkv, self.output]

    def __call__(self, x: Tensor, residual: Tensor, lens: Sequence[int], angles: Angles | None) -> Tensor:
        """Return the attention output of `x`, plus `residual`: all [T, hidden]."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, self.head_dim)
        q, k, v = qkv.to(self.dtype).unbind(1)
        if angles is not None:
            rotated = rotate(qkv[:, :2].flatten(1, 2).contiguous(), *angles, x.dtype)  # [T, 2 * H, D]
            q, k = rotated.view(len(x), 2, self.heads, self.head_dim).unbind(1)
        mixed = bidirectional_attention(q, k, v, lens, self.reach, self.head_dim**-0.5)
        return self.output(mixed.to(self.dtype), residual)


class EncoderMLP:
    """MLP with gelu between two linear layers, optionally gated."""

    def __init__(self, before: str, spec: EncoderSpec, placement: Placement) -> None:
        names, inner, size = spec.names.layer, spec.intermediate_size, placement.tp.size
        local = shard_evenly(f"{before}mlp", "intermediate size", inner, size)
        halves = 2 if spec.gated else 1
        parts = tuple(
            StoredRows(before + names.mlp_input, halves * inner, half * inner + placement.tp.rank * local, local)
            for half in range(halves)
        )
        self.input = ColumnParallelLinear(parts, spec.hidden_size, spec.mlp_bias, placement)
        self.output = RowParallelLinear(before + names.mlp_output, inner, spec.hidden_size, spec.mlp_bias, placement)
        self.activation, self.gated = spec.activation, spec.gated

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.input, self.output]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute the MLP and add the residual: both [T, hidden] -> [T, hidden]."""
        return self.output(gelu(self.input(x), self.activation, x.dtype, gated=self.gated), residual)


class EncoderLayer:
    """Attention, then MLP, each with a norm before or after it."""

    def __init__(self, spec: EncoderSpec, layer: int, placement: Placement) -> None:
        before, names = spec.layer_prefix(layer), spec.names.layer
        self.pre_norm = spec.pre_norm
        self.attention = EncoderAttention(before, spec, layer, placement)
        self.mlp = EncoderMLP(before, spec, placement)
        norms = [
            LayerNorm(before + name, spec.hidden_size, spec.norm_eps, spec.norm_bias, placement)
            for name in (names.attention_norm, names.mlp_norm)
        ]
        self.attention_norm = norms[0] if spec.has_attention_norm(layer) else None
        self.mlp_norm = norms[1]

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear | LayerNorm]:
        norm = [] if self.attention_norm is None else [self.attention_norm]
        return [*norm, *self.attention.parts, *self.mlp.parts, self.mlp_norm]

    def __call__(self, hidden: Tensor, lens: Sequence[int], angles: Angles | None) -> Tensor:
        """Run the layer: [T, hidden] -> [T, hidden]."""
        norm = self.attention_norm
        if self.pre_norm:
            hidden = self.attention(hidden if norm is None else norm(hidden), hidden, lens, angles)
            return self.mlp(self.mlp_norm(hidden), hidden)
        assert norm is not None
        hidden = norm(self.attention(hidden, hidden, lens, angles))
        return self.mlp_norm(self.mlp(hidden, hidden))


class Classifier:
    """Classification head: hidden states of one text [n, hidden] -> float32 [labels], without a final activation."""

    def __init__(self, spec: EncoderSpec, head: ClassifierSpec, placement: Placement) -> None:
        self.head = head
        self.hidden = spec.hidden_size
        self.placement = placement
        self.norm = (
            LayerNorm(head.norm, spec.hidden_size, spec.norm_eps, head.norm_bias, placement) if head.norm else None
        )

    @property
    def weight_bytes(self) -> int:
        numbers = self.hidden * (self.hidden + self.head.num_labels + self.head.dense_bias) + self.head.num_labels
        return 4 * numbers + (0 if self.norm is None else self.norm.weight_bytes)

    def load(self, weights: WeightSource) -> None:
        head, labels = self.head, self.head.num_labels
        self.dense = self._taken(weights, f"{head.dense}.weight", self.hidden, self.hidden)
        self.dense_bias = self._taken(weights, f"{head.dense}.bias", self.hidden) if head.dense_bias else None
        self.output = self._taken(weights, f"{head.output}.weight", labels, self.hidden)
        self.output_bias = self._taken(weights, f"{head.output}.bias", labels)
        if self.norm is not None:
            self.norm.load(weights)

    def _taken(self, weights: WeightSource, name: str, *shape: int) -> Tensor:
        into = self.placement.empty(*shape)
        weights.take(name, into, shape=shape)
        return into.float()

    def __call__(self, hidden: Tensor) -> Tensor:
        text = hidden.float().mean(0) if self.head.mean else hidden[0].float()  # [hidden]
        x = F.linear(text[None], self.dense, self.dense_bias)  # [1, hidden]
        x = x.tanh() if self.head.activation == "tanh" else gelu_with_torch(x, self.head.activation, torch.float32)
        if self.norm is not None:
            x = self.norm(x).float()
        return F.linear(x, self.output, self.output_bias)[0]


class _Part(Protocol):
    """A layer that owns weights."""

    @property
    def weight_bytes(self) -> int: ...

    def load(self, weights: WeightSource) -> None: ...


class _Table:
    """A small embedding that every rank holds completely: ids int64 [T] -> [T, hidden]."""

    def __init__(self, name: str, rows: int, hidden: int, placement: Placement) -> None:
        self.name, self.shape, self.placement = name, (rows, hidden), placement

    @property
    def weight_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.placement.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        self.weight = self.placement.empty(*self.shape)
        weights.take(f"{self.name}.weight", self.weight, shape=self.shape)

    def __call__(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


class Encoder:
    """One rank's shard of an encoder. It holds no weights before `load`."""

    def __init__(self, spec: EncoderSpec, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        # On other devices libraries compute the all-reduced sums, and slices would only cost time.
        slices = slices_for(spec.num_heads, spec.num_heads, spec.intermediate_size) if device.type == "cpu" else 1
        self.placement = placement = Placement(tp, dtype, device, slices=slices)
        names, hidden, before = spec.names, spec.hidden_size, spec.prefix
        self.word_embeddings = VocabParallelEmbedding(
            before + names.word_embeddings, spec.vocab_size, hidden, placement
        )
        self.positions = self.types = None
        if (first := spec.first_position) is not None:
            self.positions = _Table(before + names.positions, first + spec.max_positions, hidden, placement)
        if spec.num_token_types:
            self.types = _Table(before + names.types, spec.num_token_types, hidden, placement)
        self.embedding_norm = LayerNorm(before + names.embedding_norm, hidden, spec.norm_eps, spec.norm_bias, placement)
        self.layers = [EncoderLayer(spec, layer, placement) for layer in range(spec.num_layers)]
        self.final_norm = self.classifier = None
        if names.final_norm:
            self.final_norm = LayerNorm(before + names.final_norm, hidden, spec.norm_eps, spec.norm_bias, placement)
        if spec.classifier is not None:
            self.classifier = Classifier(spec, spec.classifier, placement)
        self.rotary = {rope: RotaryTable(rope, device) for rope in spec.ropes}

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self._parts())

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slices. `on_progress` is called with the share of bytes read, ending with 1.0."""
        total, done = self.weight_bytes, 0
        for part in self._parts():
            part.load(weights)
            done += part.weight_bytes
            on_progress(min(done / total, 0.999))
        weights.finish(lambda name: is_ignorable(self.spec, name))
        self.placement.staging.release()
        on_progress(1.0)

    def _parts(self) -> Iterator[_Part]:
        tables = (self.word_embeddings, self.positions, self.types, self.embedding_norm)
        yield from (part for part in tables if part is not None)
        for layer in self.layers:
            yield from layer.parts
        yield from (part for part in (self.final_norm, self.classifier) if part is not None)

    def __call__(self, token_ids: Tensor, positions: Tensor, types: Tensor, lens: Sequence[int]) -> Tensor:
        """Run one step; return [T, hidden].

        ids, positions within each text, and types (0 or 1, the text of a pair that a token belongs to) are int64 [T].
        `lens`: tokens of each text.
        """
        hidden = self.word_embeddings(token_ids).float()  # [T, hidden]
        if self.types is not None:
            hidden += self.types(types).float()
        if self.positions is not None and self.spec.first_position is not None:
            hidden += self.positions(positions + self.spec.first_position).float()
        hidden = self.embedding_norm(hidden)
        angles = {rope: table(positions, max(lens)) for rope, table in self.rotary.items()}
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, lens, angles[self.spec.ropes[number]] if angles else None)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the scores of one text with hidden states [n, hidden]: float32 [labels]."""
        assert self.classifier is not None
        return self.classifier(hidden)
