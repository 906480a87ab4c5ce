"""Qwen3-Next and Qwen3.5: a gated delta net in three of four layers, and a gate on attention's result. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.models.hf_config import (
    activation_name,
    decoder_spec,
    expert_counts,
    head_width,
    usual_rope,
    with_first,
)
from oarlock.workers.models.hf_delta import FULL, LINEAR, delta_layers, gated_delta
from oarlock.workers.models.hf_experts import gguf_layers_ahead, layers_ahead, sparse_by_step
from oarlock.workers.models.hf_fields import Describe, Fields
from oarlock.workers.models.hf_rope import without_sections

_POSITIONS, _HEAD = 32768, 256
_ATTENTION, _DELTA = "model.layers.*.self_attn", "model.layers.*.linear_attn"
# Layers that predict tokens further ahead, and the part for images, which a text model's checkpoint may keep.
_OTHERS = ("mtp", "model.visual")


def describe_qwen3_next(fields: Fields) -> DecoderSpec:
    """Describe Qwen3-Next, whose projections are stored by key heads."""
    experts, activation = _experts(fields, 512, 10, normalised=fields.flag("norm_topk_prob", True))
    mlps = [experts if sparse else None for sparse in sparse_by_step(fields)]
    spec, delta = _described(fields, mlps, activation, kv_heads=2)
    values = delta.num_value_heads // delta.num_key_heads
    rows = delta.key_width, delta.key_width, values * delta.value_width, values * delta.value_width
    projections = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")
    blocks = {
        f"{_DELTA}.in_proj_qkvz": Blocks(projections, rows, delta.num_key_heads),
        f"{_DELTA}.in_proj_ba": Blocks(("in_proj_b", "in_proj_a"), (values, values), delta.num_key_heads),
    }
    return replace(spec, names=replace(spec.names, blocks={**spec.names.blocks, **blocks}))


def describe_qwen3_5(fields: Fields) -> DecoderSpec:
    """Describe the dense text models of Qwen3.5."""
    activation = activation_name(fields, "hidden_act", "silu")
    return _described(fields, [None] * fields.layers(), activation, kv_heads=4)[0]


def describe_qwen3_5_moe(fields: Fields) -> DecoderSpec:
    """Describe the text models of Qwen3.5 with experts in every layer."""
    fields.check_value("norm_topk_prob", True)
    experts, activation = _experts(fields, 256, 8, normalised=True)
    return _described(fields, [experts] * fields.layers(), activation, kv_heads=2)[0]


def _described(
    fields: Fields, mlps: Sequence[ExpertsSpec | None], activation: str, *, kv_heads: int
) -> tuple[DecoderSpec, GatedDeltaSpec]:
    """Return the description that all share, and its gated delta net. `kv_heads`: the family's default."""
    fields.check_value("attention_bias", False)  # the query projection would have a bias with the gate's
    fields.check_value("attn_output_gate", True)
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0)
    is_delta = delta_layers(fields, fields.count("full_attention_interval", 4))
    delta = gated_delta(fields, (16, 32), (128, 128), norm.eps)
    rope = usual_rope(_with_plain_rope(fields), _HEAD, _POSITIONS, share=0.25)
    fields.number("partial_rotary_factor", 0.25)
    spec = decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=rope,
        qk_norm="head",
        experts=mlps,
        activation=activation,
        norm=norm,
    )
    gated = spec.with_sublayers(
        lambda one: replace(one, output_gate=True) if isinstance(one, SelfAttentionSpec) else one
    )
    # The query projection has the rows of a head's queries, then the rows of its gate.
    heads, width = fields.count("num_attention_heads"), head_width(fields, _HEAD)
    queries = Blocks(("q_proj", "gate_proj"), (width, width), heads)
    names = TensorNames(
        prefixes={"model.language_model.": "model."},
        blocks={f"{_ATTENTION}.q_proj": queries},
        ignored=(*_OTHERS, *layers_ahead(fields)),
    )
    return replace(with_first(gated, delta, is_delta), names=names), delta


def _experts(fields: Fields, count: int, chosen: int, *, normalised: bool) -> tuple[ExpertsSpec, str]:
    """Return the experts, given their default numbers, and the activation."""
    experts, top_k = expert_counts(fields, count, chosen)
    activation = activation_name(fields, "hidden_act", "silu")
    shared = SharedSpec(fields.count("shared_expert_intermediate_size", 512), "shared_expert", "shared_expert_gate")
    width, router = fields.count("moe_intermediate_size", 512), RouterSpec(top_k, normalised=normalised)
    return ExpertsSpec(experts, width, router, activation, shared=shared), activation


def _with_plain_rope(fields: Fields) -> Fields:
    """Return the config without the sections of multimodal positions, which are equal for text."""
    tables: Mapping[str, object] = {
        key: without_sections(fields.raw[key], key)
        for key in ("rope_scaling", "rope_parameters")
        if fields.raw.get(key)
    }
    return fields.derived({**fields.raw, **tables})


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of layers. A layer with a decay has a gated delta net."""
    own = gguf_layers_ahead(settings, config)
    layers, heads = range(own["num_hidden_layers"]), settings.count(".ssm.time_step_rank")
    return own | {
        "partial_rotary_factor": settings.count(".rope.dimension_count") / config["head_dim"],
        "layer_types": [LINEAR if f"blk.{index}.ssm_a" in settings.model.tensors else FULL for index in layers],
        "linear_conv_kernel_dim": settings.count(".ssm.conv_kernel"),
        "linear_num_key_heads": settings.count(".ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": settings.count(".ssm.state_size"),
        "linear_value_head_dim": settings.count(".ssm.inner_size") // max(1, heads),
    }


def _own_moe(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    return _own(settings, config) | {
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": settings.count(".expert_shared_feed_forward_length"),
        "norm_topk_prob": settings.flag(".expert_weights_norm", True),
    }


# llama.cpp shares key heads among value heads in turn, and its converter reorders Qwen3.5's value heads.
_ALIKE: dict[str, Any] = {"mlp_norm": "post_attention_norm", "stores_blocks": True}
GGUF_QWEN3_NEXT = GGUFFamily(
    *("qwen3next", "Qwen3NextForCausalLM", _own_moe, "qwen3_next"), {"width": 1}, has_experts=True, **_ALIKE
)
GGUF_QWEN3_5 = GGUFFamily(
    *("qwen35", "Qwen3_5ForCausalLM", _own, "qwen3_5_text"),
    tiles_values=True,
    others=("Qwen3_5ForConditionalGeneration",),
    **_ALIKE,
)
GGUF_QWEN3_5_MOE = GGUFFamily(
    *("qwen35moe", "Qwen3_5MoeForCausalLM", _own_moe, "qwen3_5_moe_text"),
    {"width": 1},
    has_experts=True,
    tiles_values=True,
    others=("Qwen3_5MoeForConditionalGeneration",),
    **_ALIKE,
)


FAMILIES: dict[str, Describe] = {
    "Qwen3NextForCausalLM": describe_qwen3_next,
    "Qwen3_5ForCausalLM": describe_qwen3_5,
    "Qwen3_5MoeForCausalLM": describe_qwen3_5_moe,
}
GGUF_FAMILIES = (GGUF_QWEN3_NEXT, GGUF_QWEN3_5, GGUF_QWEN3_5_MOE)
