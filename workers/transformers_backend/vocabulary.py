"""The token embedding and the output head of a class that transformers computes, divided by token id.

The head returns this rank's logits in float32. The class may change them afterwards, so padding ids are masked at the
end (`HeadPart.mask_padding`).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from oarlock.workers.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from oarlock.workers.layers.placement import Placement
from oarlock.workers.transformers_backend.linears import StandIn, mismatch
from oarlock.workers.weights.source import WeightSource


def can_replace(embedding: nn.Module) -> bool:
    """Return whether an `EmbeddingPart` computes the same: `embedding` only looks up rows."""
    # `padding_idx`, `scale_grad_by_freq` and `sparse` only affect gradients. A subclass may compute anything.
    if type(embedding) is not nn.Embedding:
        return False
    return embedding.max_norm is None


class EmbeddingPart(nn.Module):
    """The token embedding: ids int64 [...] -> [..., hidden], the same on every rank."""

    def __init__(self, name: str, embedding: nn.Embedding, placement: Placement) -> None:
        """Describe this rank's rows of `embedding`, which has the sizes of the whole model.

        `placement` has the formats of the head (`WeightFormats.of_head`).
        """
        super().__init__()
        assert can_replace(embedding), f"{name} is not a plain embedding"
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.layer = VocabParallelEmbedding(name, self.num_embeddings, self.embedding_dim, placement)
        self.weight = StandIn(name, "weight", placement)

    @property
    def weight_bytes(self) -> int:
        return self.layer.weight_bytes

    def load(self, weights: WeightSource) -> None:
        """Read this rank's rows."""
        self.layer.load(weights)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_meta:
            return torch.empty((*ids.shape, self.embedding_dim), dtype=self.weight.dtype, device="meta")
        return self.layer(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)


class HeadPart(nn.Module):
    """The output head: [..., hidden] -> float32 [..., out_features], the logits of this rank's shard of ids.

    Logits of padding ids are arbitrary until `mask_padding`.
    """

    def __init__(self, name: str, linear: nn.Linear, placement: Placement, stored_as: str | None = None) -> None:
        """Describe this rank's rows of `linear`, which has the sizes of the whole model.

        `placement` has the formats of the head. `stored_as`: the module under whose name the weight is stored, if it is
        not `name`, such as an embedding that is tied to the head but is no `EmbeddingPart`.
        """
        super().__init__()
        self.name = name
        self.stored_as = stored_as or name
        self.in_features = linear.in_features
        self.layer = VocabParallelHead(
            name, linear.out_features, self.in_features, placement, has_bias=linear.bias is not None
        )
        self.out_features = self.layer.local
        self.dtype = placement.dtype
        self.weight = StandIn(name, "weight", placement)
        self.bias = StandIn(name, "bias", placement) if self.layer.has_bias else None

    @property
    def start(self) -> int:
        """The first id of this rank's logits."""
        return self.layer.start

    @property
    def local(self) -> int:
        """Number of this rank's logits, the same on every rank; the last ids may be padding."""
        return self.layer.local

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, if the head has one of its own, and of the bias."""
        return self.layer.weight_bytes

    def load(self, weights: WeightSource) -> None:
        """Read this rank's rows, as a weight of the head's own."""
        shard = vocab_shard(self.layer)
        rows = replace(shard.parts[0], name=self.stored_as)
        weight = self.layer.placement.load(replace(shard, parts=(rows,)), weights)
        self.layer.matmul = weight.matmul(float32_output=True)
        self.load_bias(weights)

    def load_bias(self, weights: WeightSource) -> None:
        """Read the bias, which a tied head has as well."""
        self.layer.load_bias(weights)

    def tie(self, embedding: EmbeddingPart) -> None:
        """Use the weight of `embedding`, which is loaded. The bias is read by `load_bias`."""
        self.layer.tie(embedding.layer)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features or x.dtype is not self.dtype:
            raise mismatch(self.name, x, self.in_features, self.dtype)
        if x.is_meta:
            return torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float32, device="meta")
        rows = x.reshape(-1, self.in_features)
        if not rows.is_contiguous():
            rows = rows.contiguous()
        logits = self.layer.matmul(rows).float()  # [L, local]
        if self.layer.bias is not None:
            logits.add_(self.layer.bias)
        return logits.view(*x.shape[:-1], self.out_features)

    def mask_padding(self, logits: Tensor) -> Tensor:
        """Set logits of padding ids in `logits` [..., out_features] to -inf, in place. Return `logits`."""
        if self.layer.real < self.layer.local:
            logits[..., self.layer.real :] = float("-inf")
        return logits
