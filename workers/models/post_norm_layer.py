"""Gemma's decoder layer: attention and MLP have a norm before and after, applied before the residual is added.

Separate from the ordinary layer, which adds the residual inside the output product. Attributes have the same names.
"""

from typing import Any

from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.layers.attention import Attention
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.mlp import GatedMLP
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement


class PostNormDecoderLayer:
    """[T, hidden] -> [T, hidden]."""

    def __init__(self, name: str, spec: DecoderSpec, layer: int, place: Placement) -> None:
        def norm(part: str) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", spec.hidden_size, spec.rms_norm_eps, place, spec.norm_offset)

        self.attention_norm = norm("input_layernorm")
        self.attention = Attention(f"{name}.self_attn", spec, layer, place)
        self.attention_post_norm = norm("post_attention_layernorm")
        self.mlp_norm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(f"{name}.mlp", spec, place)
        self.mlp_post_norm = norm("post_feedforward_layernorm")

    @property
    def parts(self) -> list:
        before = [self.attention_norm, *self.attention.parts, self.attention_post_norm]
        return [*before, self.mlp_norm, *self.mlp.parts, self.mlp_post_norm]

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
        backend: AttentionBackend,
        plan: Any,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), None, cos, sin, batch, kv, backend, plan)
        hidden = self.attention_post_norm(attended).add_(hidden)
        fed = self.mlp(self.mlp_norm(hidden), None)
        return self.mlp_post_norm(fed).add_(hidden)  # [T, hidden]
