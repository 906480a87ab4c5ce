"""CWM, Meta's code world model: Llama's layer with Llama 3's rotation, full attention in every fourth layer.
Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec, head_width, layer_kinds, sliding_windows, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _HEAD, _THETA = 131072, 128, 1_000_000.0
# The rotation if config.json has no table.
_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": _THETA, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def describe_cwm(fields: Fields) -> DecoderSpec:
    layers, head_dim = fields.layers(), head_width(fields, _HEAD)
    kinds = layer_kinds(fields)
    if kinds is None:
        kinds = ["sliding_attention" if index % 4 else "full_attention" for index in range(layers)]
    if fields.table("rope_scaling") or fields.raw.get("rope_parameters") is not None:
        rope = usual_rope(fields, head_dim, _POSITIONS, theta=_THETA)
    else:
        rope = rope_spec(_ROPE, head_dim, fields.count("max_position_embeddings", _POSITIONS))
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=sliding_windows(fields, kinds, 8192),
        rope=rope,
        mlp_bias=fields.flag("mlp_bias", False),
        eps=1e-5,
    )


FAMILIES: dict[str, Describe] = {
    "CwmForCausalLM": describe_cwm,
}
