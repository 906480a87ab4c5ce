"""MiniMax M2: norms over all heads of q and k, rotation of a part of each head, sigmoid routing. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.mistral import MIXTRAL_NAMES

_POSITIONS, _THETA, _HEAD = 196608, 5e6, 128
# Fields of the model's first configs, with the only value that MiniMax M2 has.
_ALWAYS: dict[str, Any] = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
    **{f"layernorm_{of}_{by}": 1.0 for of in ("full_attention", "linear_attention", "mlp") for by in ("alpha", "beta")},
}


def describe_minimax_m2(fields: Fields) -> DecoderSpec:
    """Describe MiniMax M2. First configs give the rotated part of a head as `rotary_dim`."""
    for key, value in _ALWAYS.items():
        fields.check_value(key, value)
    kinds = fields.raw.get("attn_type_list") or [1]
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise unsupported("attn_type_list", kinds, "Every layer of MiniMax M2 has full attention (1).")
    head_dim = head_width(fields, _HEAD)
    rotated = fields.count("rotary_dim", head_dim)
    if rotated > head_dim or rotated % 2:
        raise unsupported("rotary_dim", rotated, f"It must be even, and at most head_dim, which is {head_dim}.")
    experts, top_k = expert_counts(fields, 256, 8)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, "sigmoid", normalised=True, correction="e_score_correction_bias")
    mixture = ExpertsSpec(experts, fields.count("intermediate_size", 1536), router, activation)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=usual_rope(fields, _HEAD, _POSITIONS, _THETA, rotated / head_dim),
        qk_norm="row",
        experts=(mixture,) * fields.layers(),
        activation=activation,
    )
    return replace(spec, names=MIXTRAL_NAMES)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_sigmoid_router()
    return {
        "intermediate_size": settings.count(".expert_feed_forward_length", config["intermediate_size"]),
        "rotary_dim": settings.count(".rope.dimension_count", config["head_dim"]),
    }


GGUF_MINIMAX_M2 = GGUFFamily("minimax-m2", "MiniMaxM2ForCausalLM", _own, "minimax_m2", has_experts=True)


FAMILIES: dict[str, Describe] = {
    "MiniMaxM2ForCausalLM": describe_minimax_m2,
}
GGUF_FAMILIES = (GGUF_MINIMAX_M2,)
