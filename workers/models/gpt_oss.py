"""gpt-oss: a learned sink in every attention head, windows in every other layer, and experts with clamped SwiGLU.

Torch-free.
"""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, expert_counts, layer_kinds
from oarlock.workers.models.hf_fields import Describe, Fields
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_POSITIONS, _HEAD = 131072, 64
_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def describe_gpt_oss(fields: Fields) -> DecoderSpec:
    """Describe gpt-oss. Experts are chosen by logits with a bias, and weighted by the softmax over the chosen
    experts."""
    layers, bias = fields.layers(), fields.flag("attention_bias", True)
    kinds = layer_kinds(fields) or ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    window = None if fields.raw.get("sliding_window", 128) is None else fields.count("sliding_window", 128)
    table = {"rope_theta": 150000.0} | {key: value for key, value in rope_table(fields).items() if value is not None}
    table = table if len(table) > 1 else table | _ROPE
    original = fields.raw.get("original_max_position_embeddings")
    positions = fields.count("max_position_embeddings", _POSITIONS)
    experts, top_k = expert_counts(fields, 128, 4)
    fields.choice("hidden_act", "silu", {"silu": "silu"})
    mixture = ExpertsSpec(
        experts,
        fields.count("intermediate_size", 2880),
        RouterSpec(top_k, normalised=True, bias=True, name="router"),
        "clamped_swiglu",
        alpha=fields.number("swiglu_alpha", 1.702),
        limit=fields.number("swiglu_limit", 7.0),
        bias=True,
    )
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        rope=rope_spec(table, fields.count("head_dim", _HEAD), positions, original=original),
        qkv_bias=bias,
        o_bias=bias,
        experts=(mixture,) * layers,
        activation="silu",
        eps=1e-5,
    )
    return spec.with_sublayers(lambda one: replace(one, sinks=True) if isinstance(one, SelfAttentionSpec) else one)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return gpt-oss's settings.

    GGUF records neither YaRN's `truncate` nor `swiglu_limit`; all published gpt-oss models use the same values.
    """
    settings.check_whole_heads(config["head_dim"])
    scaling = config["rope_scaling"]
    return {
        "sliding_window": settings.count(".attention.sliding_window"),
        "intermediate_size": settings.count(".expert_feed_forward_length", config["intermediate_size"]),
        "rope_scaling": {"rope_type": "default"} if scaling is None else {"truncate": False, **scaling},
    }


GGUF_GPT_OSS = GGUFFamily(
    "gpt-oss", "GptOssForCausalLM", _own, "gpt_oss", has_experts=True, mlp_norm="post_attention_norm"
)


FAMILIES: dict[str, Describe] = {
    "GptOssForCausalLM": describe_gpt_oss,
}
GGUF_FAMILIES = (GGUF_GPT_OSS,)
