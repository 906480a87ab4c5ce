"""The attention half of a decoder layer on one rank: from the projection of q, k and v to the output projection.

The sum over ranks after the output projection is the only communication. The backend owns the pages and their layout.
"""

from typing import Any

from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, FusedBackend, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.linear import QKVParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import HeadNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import rotate


class Attention:
    """Projections, head norm, rotary embedding, KV write, attention, output projection; any mix of query lengths."""

    def __init__(self, name: str, spec: DecoderSpec, layer: int, place: Placement) -> None:
        self.place = place
        self.head_dim = spec.head_dim
        self.qkv = QKVParallelLinear(
            name, spec.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.qkv_bias, place
        )
        shard = self.qkv.shard
        self.output = RowParallelLinear(
            f"{name}.o_proj", spec.num_heads * spec.head_dim, spec.hidden_size, spec.o_bias, place
        )
        self.norm = None
        if spec.qk_norm:
            self.norm = HeadNorm(
                name, shard.num_heads, shard.num_kv_heads, spec.head_dim, spec.rms_norm_eps, place, spec.norm_offset
            )
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=shard.num_heads,
            num_kv_heads=shard.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            sliding_window=spec.windows[layer],
            softcap=spec.attention_softcap,
        )

    @property
    def parts(self) -> list[QKVParallelLinear | RowParallelLinear | HeadNorm]:
        return [self.qkv, self.output] if self.norm is None else [self.qkv, self.norm, self.output]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        backend: AttentionBackend,
        plan: Any,
    ) -> Tensor:
        """`x` [T, hidden] (normed) -> [T, hidden]: `residual` [T, hidden] plus the attention output, or that alone.

        `cos`, `sin`: see `RotaryTable`. `plan`: what the backend's `prepare` returned for this step.
        """
        return self.output(self.mixed(x, cos, sin, batch, kv, backend, plan), residual)

    def mixed(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        backend: AttentionBackend,
        plan: Any,
    ) -> Tensor:
        """Values as the rank's heads mix them, before `output`: [T, H * D]."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        if isinstance(backend, FusedBackend):
            norm = None if self.norm is None else (self.norm.weight, self.norm.eps)
            q = backend.rotate_and_write(kv, qkv, norm, cos, sin, batch)  # [T, H, D]
        else:
            qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
            if self.norm is not None:
                qk = self.norm(qk)
            qk = rotate(qk, cos, sin, x.dtype)  # [T, H + K, D]
            backend.write(kv, qk[:, heads:], v, batch)
            q = qk[:, :heads]
        return backend.attend(q, kv, plan, self.spec)
