"""Attention backends that record their arguments and results, for a verification.

Each calls the kernels that serve. A kernel that rotates keys and writes them to the pages returns queries only, so the
keys are read back from the pages.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from oarlock.workers.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    FusedBackend,
    FusedLatentBackend,
    LayerKV,
)
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec

Record = Callable[[str, Tensor], None]


def recording_backend(
    inner: AttentionBackend, record: Record, latents: Mapping[int, LatentAttentionSpec], *, diagnostics: bool
) -> "RecordingBackend":
    """Return a backend that calls `inner` and records by `record`, for layers that choose their kernels by its type.

    `latents`: layers with latent attention. `diagnostics`: also record tensors that only the search for a cause needs.
    """
    kind = _FusedRecording if isinstance(inner, FusedBackend | FusedLatentBackend) else RecordingBackend
    return kind(inner, record, latents, diagnostics=diagnostics)


class RecordingBackend:
    """An attention backend whose arguments and results are recorded."""

    def __init__(
        self, inner: Any, record: Record, latents: Mapping[int, LatentAttentionSpec], *, diagnostics: bool
    ) -> None:
        self._inner = inner
        self._record = record
        self._latents = latents
        self._diagnostics = diagnostics
        self._written: Tensor | None = None  # keys [T, K, D] of the layer that the next call of `attend` names
        # Protocols look for attributes without `__getattr__` since Python 3.12.
        self.name, self.spec, self.why_not = inner.name, inner.spec, inner.why_not
        self.allocate, self.prepare = inner.allocate, inner.prepare

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        self._written = k
        self._inner.write(kv, k, v, batch)

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        if (latent := self._latents.get(layer.layer)) is not None:
            return self._attend_latent(q, kv, plan, layer, latent)
        if self._written is not None:  # otherwise the layer reads keys that another has written
            self._record(f"{layer.layer}.k_rope", self._written)
            self._written = None
        self._record(f"{layer.layer}.q_rope", q)
        attended = self._inner.attend(q, kv, plan, layer, sinks)
        self._record(f"{layer.layer}.attention", attended.view(attended.shape[0], layer.num_heads, -1))
        return attended

    def _attend_latent(
        self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec, latent: LatentAttentionSpec
    ) -> Tensor:
        """Attend with absorbed queries and the rows written last. Both have the latent first, then rotated elements."""
        assert self._written is not None
        name, rows = layer.layer, self._written[:, 0]
        self._written = None
        self._record(f"{name}.latent", rows[:, : latent.kv_rank])
        self._record(f"{name}.k_rope", rows[:, latent.kv_rank :])
        self._record(f"{name}.q_rope", q[:, :, latent.kv_rank :])
        attended = self._inner.attend(q, kv, plan, layer)
        if self._diagnostics:
            self._record(f"{name}.absorbed", q[:, :, : latent.kv_rank])
            self._record(f"{name}.attended", attended.view(len(q), layer.num_heads, -1))
        return attended


class _FusedRecording(RecordingBackend):
    """Records a `FusedBackend` or a `FusedLatentBackend`."""

    def rotate_and_write(
        self, kv: LayerKV, qkv: Tensor, norm: Any, cos: Tensor, sin: Tensor, batch: ForwardBatch, **options: Any
    ) -> Tensor:
        queries = self._inner.rotate_and_write(kv, qkv, norm, cos, sin, batch, **options)
        self._written = self.stored_keys(kv, batch)
        return queries

    def norm_rotate_and_write(
        self, kv: LayerKV, q: Tensor, rows: Tensor, norm: Any, angles: Any, batch: ForwardBatch, **options: Any
    ) -> Tensor:
        queries = self._inner.norm_rotate_and_write(kv, q, rows, norm, angles, batch, **options)
        self._written = self.stored_keys(kv, batch)
        return queries

    def stored_keys(self, kv: LayerKV, batch: ForwardBatch) -> Tensor:
        return self._inner.stored_keys(kv, batch)
