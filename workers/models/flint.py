"""Flint and Kolibri: sigmoid routing, norms of heads, and rotation only in layers with a window. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    BEFORE,
    Norms,
    activation_name,
    decoder_spec,
    expert_counts,
    layer_kinds,
    sliding_windows,
    usual_rope,
)
from oarlock.workers.models.hf_experts import sparse_by_step
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS, _HEAD = 262144, 128
_LAYER = "model.layers.*"
_FLINT_NAMES = TensorNames(modules={f"{_LAYER}.self_attn.softmax_offset": f"{_LAYER}.self_attn.sinks"})
_KOLIBRI_NAMES = TensorNames(
    modules={
        f"{_LAYER}.moe.router.expert_bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
        f"{_LAYER}.post_attn_norm": f"{_LAYER}.post_self_attn_layernorm",
        f"{_LAYER}.post_ffn_norm": f"{_LAYER}.post_mlp_layernorm",
    }
)
_KOLIBRI_NORMS = (
    ("input_layernorm", "post_self_attn_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)


def describe_flint(fields: Fields) -> DecoderSpec:
    """Describe Flint, with a sink in every head, dense first layers, and scores that are not corrected."""
    layers, bias = fields.layers(), fields.flag("attention_bias", False)
    kinds = layer_kinds(fields) or [
        "full_attention" if index < 2 or index % 4 == 1 or index == layers - 1 else "sliding_attention"
        for index in range(layers)
    ]
    experts, top_k = expert_counts(fields, 256, 6)
    router = RouterSpec(top_k, "sigmoid", normalised=fields.flag("norm_topk_prob", True))
    shared = SharedSpec(fields.count("shared_expert_intermediate_size", 1024), "shared_expert")
    spec = _described(fields, kinds, experts, router, shared, sparse_by_step(fields, (0, 1)), bias=bias)
    sinks = spec.with_sublayers(lambda one: replace(one, sinks=True) if isinstance(one, SelfAttentionSpec) else one)
    return replace(sinks, names=_FLINT_NAMES)


def describe_kolibri1(fields: Fields) -> DecoderSpec:
    """Describe Kolibri, with norms after attention and experts, and logits that are corrected to choose experts."""
    fields.check_value("attention_bias", False)
    layers, (experts, top_k) = fields.layers(), expert_counts(fields, 384, 6)
    kinds = layer_kinds(fields) or [
        "sliding_attention" if (index + 1) % 5 else "full_attention" for index in range(layers)
    ]
    router = RouterSpec(
        top_k,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", False),
        correction="gate.e_score_correction_bias",
        corrects_logits=True,
    )
    shared = SharedSpec(fields.count("shared_expert_intermediate_size", 512))
    spec = _described(fields, kinds, experts, router, shared, [True] * layers, norms=_KOLIBRI_NORMS)
    return replace(spec, names=_KOLIBRI_NAMES)


def _described(
    fields: Fields,
    kinds: list[str],
    experts: int,
    router: RouterSpec,
    shared: SharedSpec,
    sparse: Sequence[bool],
    *,
    bias: bool = False,
    norms: Norms = BEFORE,
) -> DecoderSpec:
    windows, rope = sliding_windows(fields, kinds, 513), usual_rope(fields, _HEAD, _POSITIONS)
    activation = activation_name(fields, "hidden_act", "silu")
    width = fields.count("moe_intermediate_size", 512)
    mixture = ExpertsSpec(experts, width, router, activation, shared=shared)
    return decoder_spec(
        fields,
        kv_heads=4,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=[None if window is None else rope for window in windows],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=[mixture if is_sparse else None for is_sparse in sparse],
        activation=activation,
        norms=norms,
    )


FAMILIES: dict[str, Describe] = {
    "FlintForCausalLM": describe_flint,
    "Kolibri1ForCausalLM": describe_kolibri1,
}
