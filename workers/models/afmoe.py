"""AFMoE (Arcee Trinity): a gate on attention's result, windows in most layers, and sigmoid routing with a correction.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width, layer_kinds
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_POSITIONS, _HEAD = 16384, 128
_NAMES = TensorNames(modules={"model.layers.*.mlp.router.gate.weight": "model.layers.*.mlp.router.weight"})
_NORMS = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_mlp_layernorm", "post_mlp_layernorm"),
)
# Settings of the authors' code that transformers does not have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "score_func": ("sigmoid",), "route_norm": (True,), "n_group": (1,), "topk_group": (1,), "num_expert_groups": (1,),
    "num_limited_groups": (1,),
}  # fmt: skip


def describe_afmoe(fields: Fields) -> DecoderSpec:
    """Describe AFMoE. Layers with a window are rotated, the others are not."""
    layers, every = fields.layers(), fields.count("global_attn_every_n_layers", 4)
    default = ["full_attention" if (index + 1) % every == 0 else "sliding_attention" for index in range(layers)]
    is_local = [kind == "sliding_attention" for kind in layer_kinds(fields) or default]
    if fields.raw.get("sliding_window", 1024) is None and any(is_local):
        raise unsupported("sliding_window", None, "It must be a number of tokens.")
    fields.serve_only(_FIXED)
    window, bias = fields.count("sliding_window", 1024), fields.flag("attention_bias", False)
    positions = fields.count("max_position_embeddings", _POSITIONS)
    rope = rope_spec(rope_table(fields), head_width(fields, _HEAD), positions)
    activation = activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 64, 6)
    width, shared = fields.count("moe_intermediate_size", 1408), fields.count("num_shared_experts", 2, least=0)
    router = RouterSpec(
        top_k,
        "sigmoid",
        normalised=True,
        scale=fields.number("route_scale", 1.0),
        name="router",
        correction="expert_bias",
    )
    mixture = ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width) if shared else None)
    dense = min(layers, fields.count("num_dense_layers", 1, least=0))
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=tuple(window if local else None for local in is_local),
        rope=rope,
        ropes=[rope if local else None for local in is_local],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        activation=activation,
        experts=[None] * dense + [mixture] * (layers - dense),
        norms=_NORMS,
        embedding_scale=fields.count("hidden_size") ** 0.5 if fields.flag("mup_enabled", False) else 1.0,
        eps=1e-5,
    )
    gated = spec.with_sublayers(
        lambda one: replace(one, output_gate=True) if isinstance(one, SelfAttentionSpec) else one
    )
    return replace(gated, names=_NAMES)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return AFMoE's settings. GGUF does not record that embeddings are scaled: all its models scale them."""
    settings.check_whole_heads(config["head_dim"])
    return {
        "mup_enabled": True,
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "sliding_window": settings.count(".attention.sliding_window"),
        "num_dense_layers": settings.count(".leading_dense_block_count", 0),
        "num_shared_experts": settings.count(".expert_shared_count", 0),
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "route_norm": settings.flag(".expert_weights_norm", True),
        "route_scale": settings.number(".expert_weights_scale", 1.0),
    }


GGUF_AFMOE = GGUFFamily("afmoe", "AfmoeForCausalLM", _own, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "AfmoeForCausalLM": describe_afmoe,
}
GGUF_FAMILIES = (GGUF_AFMOE,)
