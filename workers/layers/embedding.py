"""Embedding and output head, cut along the vocabulary. Shards are equal; ids beyond the vocabulary are padding."""

import torch.nn.functional as F
from torch import Tensor

from workers.layers.matmul import PlainMatmul, matmul
from workers.layers.placement import Placement
from workers.layers.shards import shard_vocab
from workers.weights.source import WeightSource


class VocabParallelEmbedding:
    """ids [T] -> [T, hidden]. A rank looks up its own ids; the others' rows are zero until the sum over ranks."""

    def __init__(self, name: str, vocab_size: int, hidden: int, place: Placement) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.place = place
        self.start, self.local, self.real = shard_vocab(vocab_size, place.tp.rank, place.tp.size)

    @property
    def weight_bytes(self) -> int:
        return self.local * self.hidden * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        self.weight = load_vocab_shard(self, weights)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.place.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.local)
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
        return self.place.tp.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class VocabParallelHead:
    """hidden [L, hidden] -> float32 logits [L, local]: this rank's shard of the vocabulary, padding at -inf."""

    def __init__(self, name: str, vocab_size: int, hidden: int, place: Placement) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.hidden = hidden
        self.place = place
        self.start, self.local, self.real = shard_vocab(vocab_size, place.tp.rank, place.tp.size)
        self.shares_memory = False

    @property
    def weight_bytes(self) -> int:
        return 0 if self.shares_memory else self.local * self.hidden * self.place.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        self.product = matmul(load_vocab_shard(self, weights))

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's weight. Where weights are packed this is a second form of it, in memory of its own: rows
        cannot be looked up in the packed one, and the plain one would take half as long again at each step."""
        self.product = matmul(embedding.weight)
        self.shares_memory = isinstance(self.product, PlainMatmul)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.product(hidden).float()  # [L, local]
        if self.real < self.local:
            logits[:, self.real :] = float("-inf")
        return logits


def load_vocab_shard(layer: VocabParallelEmbedding | VocabParallelHead, weights: WeightSource) -> Tensor:
    """The layer's rows of `{name}.weight`, padding rows zero."""
    weight = layer.place.empty(layer.local, layer.hidden)
    weight[layer.real :] = 0.0
    start = min(layer.start, layer.vocab_size)
    weights.take(f"{layer.name}.weight", weight[: layer.real], shape=(layer.vocab_size, layer.hidden), start=start)
    return weight
