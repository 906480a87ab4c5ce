"""Planted faults of latent attention: each breaks the product in one place, by patching it."""

from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.layers.latent_attention import LatentAttention, LatentMatrices
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.method import WeightShard
from oarlock.workers.weights.source import WeightSource
from tests.golden.mutations import with_init


def values_from_the_wrong_half(patch: MonkeyPatch, backend: type[AttentionBackend] = ReferenceBackend) -> None:
    """Scores stay right, and values are the last elements of a row: pages and queries begin with other elements."""
    write, attend = backend.write, backend.attend

    def begin(x: Tensor, backend: AttentionBackend) -> Tensor:
        return x.roll(backend.spec.value_width - x.shape[-1], -1)

    def patched_write(self: Any, kv: LayerKV, k: Tensor, v: Tensor | None, batch: Any) -> None:
        write(self, kv, begin(k, self), v, batch)

    def patched_attend(self: Any, q: Tensor, *others: Any) -> Tensor:
        return attend(self, begin(q, self), *others)

    patch.setattr(backend, "write", patched_write)
    patch.setattr(backend, "attend", patched_attend)


def _with_projections(patch: MonkeyPatch, **changes: Any) -> None:
    """Change the results of projections of a layer, by its attributes, after they have been recorded. The changes are
    called with the layer and the result."""
    usual = LatentAttention.queries_and_rows

    def patched(self: LatentAttention, *arguments: Any) -> tuple[Tensor, Tensor]:
        before = {name: getattr(self, name) for name in changes}
        for name, change in changes.items():
            setattr(self, name, lambda x, name=name, change=change: change(self, before[name](x)))
        try:
            return usual(self, *arguments)
        finally:
            for name, projection in before.items():
                setattr(self, name, projection)

    patch.setattr(LatentAttention, "queries_and_rows", patched)


def first_elements_of_queries_rotated(patch: MonkeyPatch) -> None:
    """Queries are read as [rotated, not rotated]."""

    def change(layer: LatentAttention, q: Tensor) -> Tensor:
        return q.unflatten(1, (layer.spec.num_heads, -1)).roll(-layer.sizes.rope_width, 2).flatten(1)

    _with_projections(patch, q=change)


def key_of_the_latent_rotated(patch: MonkeyPatch) -> None:
    """The rotated key is taken from the first elements of the row, which are the latent's."""

    def change(layer: LatentAttention, row: Tensor) -> Tensor:
        return torch.cat((row[:, : layer.sizes.kv_rank], row[:, : layer.sizes.rope_width]), 1)

    _with_projections(patch, kv_a=change)


def heads_of_the_next_rank(patch: MonkeyPatch) -> None:
    """Each rank takes the two matrices of the heads of the next."""
    usual = LatentMatrices.__init__

    def patched(
        self: LatentMatrices, name: str, spec: LatentAttentionSpec, first: int, heads: int, place: Placement
    ) -> None:
        usual(self, name, spec, (first + heads) % spec.num_heads, heads, place)

    patch.setattr(LatentMatrices, "__init__", patched)


def halves_of_matrices_exchanged(patch: MonkeyPatch) -> None:
    """The rows of a head in `kv_b_proj` are read as [values, keys]."""
    usual, load = LatentMatrices.__init__, Placement.load_dequantized
    shapes: dict[str, tuple[int, int]] = {}  # tensor -> heads, rows of keys of one head

    def described(self: LatentMatrices, *arguments: Any) -> None:
        usual(self, *arguments)
        shapes.update({shard.parts[0].name: (self.heads, self.nope_width) for shard in self.weight_shards})

    def exchanged(self: Placement, shard: WeightShard, weights: WeightSource) -> Tensor:
        heads, width = shapes[shard.parts[0].name]
        return load(self, shard, weights).unflatten(0, (heads, -1)).roll(width, 1).flatten(0, 1)

    patch.setattr(LatentMatrices, "__init__", described)
    patch.setattr(Placement, "load_dequantized", exchanged)


def scale_without_mscale(patch: MonkeyPatch) -> None:
    with_init(
        patch, LatentAttention, "spec", lambda layer: replace(layer.spec, scale=layer.sizes.query_width**-0.5)
    )  # fmt: skip


def latent_not_normed(patch: MonkeyPatch) -> None:
    norm = RMSNorm.__call__
    patch.setattr(RMSNorm, "__call__", lambda self, x: x if self.name.endswith("kv_a_layernorm") else norm(self, x))


def latent_of_other_bits_on_the_last_rank(patch: MonkeyPatch) -> None:
    """One element of its row is the next number."""

    def change(layer: LatentAttention, row: Tensor) -> Tensor:
        tp = layer.placement.tp
        if tp.rank == tp.size - 1:
            row[:, 0] = torch.nextafter(row[:, 0], torch.tensor(torch.inf))
        return row

    _with_projections(patch, kv_a=change)
