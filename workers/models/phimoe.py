"""Phi-3.5-MoE: LayerNorm with a bias, LongRoPE with its own factor, experts chosen by SparseMixer. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_kind, rope_spec, rope_table
from oarlock.workers.models.mistral import MIXTRAL_NAMES

_POSITIONS, _THETA = 4096 * 32, 1e6
_SCALES = ("short_mscale", "long_mscale")
_PUBLISHED_SCALE = 1.243163121016122
# transformers names the router differently from published checkpoints.
_NAMES = TensorNames(modules={**MIXTRAL_NAMES.modules, "model.layers.*.mlp.router": "model.layers.*.mlp.gate"})


def describe_phimoe(fields: Fields) -> DecoderSpec:
    """Describe Phi-3.5-MoE. SparseMixer always chooses two experts."""
    experts, top_k = expert_counts(fields, 16, 2)
    if top_k != 2:
        raise unsupported("num_experts_per_tok", top_k, "SparseMixer chooses two experts for each token.")
    window = None if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
    bias, activation = fields.flag("attention_bias", False), activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, "sparsemixer", tolerance=2 * fields.number("router_jitter_noise", 0.01))
    mixture = ExpertsSpec(experts, fields.count("intermediate_size"), router, activation)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(window,) * fields.layers(),
        rope=_rope(fields),
        qkv_bias=bias,
        o_bias=bias,
        experts=(mixture,) * fields.layers(),
        activation=activation,
        norm=NormSpec("layer", fields.number("rms_norm_eps", 1e-5), bias=True),
    )
    return replace(spec, head_bias=fields.flag("lm_head_bias", False), names=_NAMES)


def _rope(fields: Fields) -> RopeSpec:
    """Return the rotary embedding, whose cos and sin are scaled by `short_mscale`, which equals `long_mscale`."""
    table = rope_table(fields, _THETA)
    if table.get("rope_type", table.get("type")) == "su":
        table |= {"rope_type": "longrope"}
    scales = [table.pop(key, None) for key in _SCALES]
    if (kind := rope_kind(table)) not in ("default", "longrope"):
        raise unsupported("rope type", kind, "Phi-3.5-MoE has 'default' or 'longrope'.")
    if kind == "longrope":
        short, long = (
            positive_number(f"rope setting {key}", of, None) for key, of in zip(_SCALES, scales, strict=True)
        )
        if short != long:
            raise unsupported("rope setting long_mscale", long, f"It must equal short_mscale, {short:g}.")
        table |= {"attention_factor": short}
    return rope_spec(
        table,
        head_width(fields, None),
        fields.count("max_position_embeddings", _POSITIONS),
        original=fields.raw.get("original_max_position_embeddings"),
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Phi's settings. The file has another factor of cos and sin than the published models."""
    settings.check_whole_heads(config["head_dim"])
    rope = config["rope_scaling"]
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "lm_head_bias": "output.bias" in settings.model.tensors,
        "sliding_window": settings.count(".attention.sliding_window", 0) or None,
    }
    if rope is not None and rope["rope_type"] == "longrope":
        length = settings.count(".rope.scaling.original_context_length")
        scaled = {**rope, "original_max_position_embeddings": length, **dict.fromkeys(_SCALES, _PUBLISHED_SCALE)}
        own["rope_scaling"] = scaled
    return own


GGUF_PHIMOE = GGUFFamily("phimoe", "PhimoeForCausalLM", _own, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "PhiMoEForCausalLM": describe_phimoe,  # the name in published checkpoints
    "PhimoeForCausalLM": describe_phimoe,
}
GGUF_FAMILIES = (GGUF_PHIMOE,)
