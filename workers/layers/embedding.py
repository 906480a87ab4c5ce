"""Embedding and output head, split by token id, and the table of positions.

Shards have equal sizes; ids beyond the vocabulary are padding.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import AdaptedRows
from oarlock.workers.layers.decoder_spec import DecoderSpec, PositionTable
from oarlock.workers.layers.linear import AdaptedLayer
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_vocab
from oarlock.workers.quantization.matmul import ReadableMatmul, holds_weight
from oarlock.workers.quantization.method import LinearWeight, StoredRows, WeightShard
from oarlock.workers.weights.source import WeightSource


class EmbeddingUpdate(Protocol):
    """An embedding in steps in which rows have adapters."""

    @property
    def rows(self) -> Any:
        """Rows of the step that runs that have an adapter of the embedding; None if there are none."""

    def __call__(self, ids: Tensor, found: Tensor, rows: Any) -> Tensor:
        """Return `found` [T, hidden], the embedding's rows before the scale, with the updates of `rows`."""


class VocabParallelEmbedding:
    """Embedding: ids int64 [T] -> [T, hidden]. A rank looks up the ids of its shard and sets the rows of others to
    minus zero before the all-reduce."""

    adapted: EmbeddingUpdate | None = None  # set if the model serves adapters

    def __init__(self, name: str, vocab_size: int, hidden: int, placement: Placement, scale: float = 1.0) -> None:
        """Set the sizes of this rank's shard. `scale` is rounded to the weights' dtype, as in training, and multiplies
        every row."""
        self.name = name
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.placement = placement
        self.scale = torch.tensor(scale, dtype=placement.dtype).item()
        self.start, self.local, self.real = shard_vocab(vocab_size, placement.tp.rank, placement.tp.size)

    @property
    def weight_bytes(self) -> int:
        return self.placement.weight_bytes(vocab_shard(self), bias=False)

    def load(self, weights: WeightSource) -> None:
        weight = self.placement.load(vocab_shard(self), weights)
        self.weight: LinearWeight | None = weight
        self.look_up: Callable[[Tensor], Tensor] = weight.embed

    def share(self, matmul: ReadableMatmul) -> None:
        """Read rows from the output head's packed weight from now on, and free the plain weight."""
        self.weight = None
        self.look_up = matmul.rows

    def __call__(self, ids: Tensor) -> Tensor:
        rows = self._rows(ids)
        if self.adapted is not None and (adapted := self.adapted.rows) is not None:
            rows = self.adapted(ids, rows, adapted)
        return rows if self.scale == 1.0 else rows * self.scale

    def _rows(self, ids: Tensor) -> Tensor:
        if self.placement.tp.size == 1:
            return self.look_up(ids)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.local)
        rows = self.look_up(local.masked_fill_(elsewhere, 0))
        # Adding minus zero changes no value. Adding zero would change the sign of a weight that is minus zero.
        return self.placement.tp.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), -0.0))


class PositionEmbedding:
    """Learned table of positions: adds the row of each token's position to its embedding [T, hidden].

    Every rank has the whole table, so the addition is the same on all of them: it follows the all-reduce of the
    embedding, and is rounded once, to the weights' dtype.
    """

    def __init__(self, name: str, table: PositionTable, hidden: int, placement: Placement) -> None:
        self.name = name
        self.table = table
        self.hidden = hidden
        self.placement = placement

    @property
    def weight_bytes(self) -> int:
        return self.table.rows * self.hidden * self.placement.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        shape = self.table.rows, self.hidden
        self.weight = self.placement.empty(*shape)
        weights.take(f"{self.name}.weight", self.weight, shape=shape)

    def __call__(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Return the sum [T, hidden]. `positions`: int64 [T]."""
        return embedded + F.embedding(positions + self.table.first, self.weight)


class VocabParallelHead:
    """Output head: hidden [L, hidden] -> float32 logits [L, local] of this rank's shard; padding ids get -inf."""

    adapted: AdaptedLayer | None = None  # set if the model serves adapters

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden: int,
        placement: Placement,
        softcap: float | None = None,
        scale: float = 1.0,
        *,
        has_bias: bool = False,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.placement = placement
        self.start, self.local, self.real = shard_vocab(vocab_size, placement.tp.rank, placement.tp.size)
        self.softcap = softcap
        self.scale = scale
        self.shares_memory = False
        self.has_bias = has_bias
        self.bias: Tensor | None = None  # float32 [local]

    @staticmethod
    def of(spec: DecoderSpec, placement: Placement) -> "VocabParallelHead":
        """Return the output head of a model, with the model's bias, scaling and softcap of logits."""
        changes = spec.logit_softcap, spec.logit_scale
        shape = spec.vocab_size, spec.hidden_size
        return VocabParallelHead("lm_head", *shape, placement, *changes, has_bias=spec.head_bias)

    @property
    def weight_bytes(self) -> int:
        bias = 4 * self.local if self.has_bias else 0
        return bias + (0 if self.shares_memory else self.placement.weight_bytes(vocab_shard(self), bias=False))

    def load(self, weights: WeightSource) -> None:
        self.matmul = self.placement.load(vocab_shard(self), weights).matmul(float32_output=True)
        self.load_bias(weights)

    def load_bias(self, weights: WeightSource) -> None:
        """Read the bias, which a tied head has as well."""
        if self.has_bias:
            self.bias = vocab_shard(self).take_bias(weights, self.placement.empty).float()

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight.

        The packed format of our kernels serves both. Rows cannot be read from oneDNN's packed format, so with oneDNN
        the head keeps a packed copy of its own: matmuls with the plain weight are much slower.
        """
        assert embedding.weight is not None
        self.matmul = embedding.weight.matmul(float32_output=True)
        if isinstance(self.matmul, ReadableMatmul):
            embedding.share(self.matmul)
        self.shares_memory = isinstance(self.matmul, ReadableMatmul) or holds_weight(self.matmul)

    def __call__(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """Compute the logits. `adapters`: of the rows of `hidden`; None if none of them has one."""
        own = None if adapters is None or self.adapted is None else adapters.among(self.adapted.pairs.used)
        # [L, local]
        logits = (self.matmul(hidden) if own is None or self.adapted is None else self.adapted(hidden, own)).float()
        if self.bias is not None:
            logits.add_(self.bias)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.real < self.local:
            logits[:, self.real :] = float("-inf")
        return logits


def vocab_shard(layer: VocabParallelEmbedding | VocabParallelHead) -> WeightShard:
    """Return the layer's rows of `{name}.weight`, with zeros for padding ids: [local, hidden]."""
    start = min(layer.start, layer.vocab_size)
    rows = StoredRows(layer.name, layer.vocab_size, start, layer.real)
    return WeightShard((rows,), layer.hidden, 0, layer.hidden, padding=layer.local - layer.real)
