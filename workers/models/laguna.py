"""Laguna: gated heads of attention, whose number differs between layers, and sigmoid routing with a correction.

Torch-free.
"""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    activation_name,
    decoder_spec,
    expert_counts,
    head_width,
    layer_kinds,
    sliding_windows,
)
from oarlock.workers.models.hf_experts import sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _HEAD = 131_072, 128
_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
_CORRECTION = "e_score_correction_bias"
_NAMES = TensorNames(
    modules={
        "model.layers.*.self_attn.g_proj": "model.layers.*.self_attn.gate_proj",
        f"model.layers.*.mlp.experts.{_CORRECTION}": f"model.layers.*.mlp.gate.{_CORRECTION}",
        "model.layers.*.mlp.shared_expert": "model.layers.*.mlp.shared_experts",
    }
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "moe_apply_router_weight_on_input": (False,), "moe_router_logit_softcapping": (0, 0.0),
}  # fmt: skip
_GATES = {True: True, "per-head": True, "per-element": False, False: False}  # as transformers reads `gating`


def describe_laguna(fields: Fields) -> DecoderSpec:
    """Describe Laguna, with a rotary table for each kind of attention."""
    fields.serve_only(_FIXED)
    layers = fields.layers()
    kinds = layer_kinds(fields) or ["full_attention"] * layers
    ropes = rope_by_kind(fields, kinds, head_width(fields, _HEAD), _ROPES, 1.0)
    bias, activation = fields.flag("attention_bias", False), activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 256, 8)
    scale = fields.number("moe_routed_scaling_factor", 1.0)
    router = RouterSpec(top_k, "sigmoid", normalised=True, scale=scale, correction=f"gate.{_CORRECTION}")
    shared = SharedSpec(fields.count("shared_expert_intermediate_size", 512))
    mixture = ExpertsSpec(experts, fields.count("moe_intermediate_size", 512), router, activation, shared=shared)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=sliding_windows(fields, kinds, 512),
        rope=ropes[0],
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        activation=activation,
        experts=[mixture if is_sparse else None for is_sparse in sparse_layers(fields, 1)],
    )
    counts, per_head = _heads(fields), _gates_heads(fields)
    changed = [_with_heads(layer, heads, per_head) for layer, heads in zip(spec.layers, counts, strict=True)]
    return replace(spec, layers=tuple(changed), names=_NAMES)


def rope_by_kind(
    fields: Fields, kinds: list[str], head_dim: int, defaults: dict[str, dict[str, Any]], share: float
) -> list[RopeSpec]:
    """Return the rotary settings of each layer of `kinds`, from a table for each kind in `rope_parameters`.

    `share`: the part of each head that is rotated if a table has none.
    """
    for key in ("rope_theta", "rope_scaling"):
        fields.check_value(key)
    tables = fields.table("rope_parameters") or defaults
    positions = fields.count("max_position_embeddings", _POSITIONS)
    found: dict[str, RopeSpec] = {}
    for kind in dict.fromkeys(kinds):
        table = tables.get(kind)
        if not isinstance(table, dict) or table.get("rope_theta") is None:
            raise unsupported("rope_parameters", tables, f"It must have a table with rope_theta for {kind}.")
        part = positive_number("partial_rotary_factor", table.get("partial_rotary_factor"), share)
        found[kind] = rope_spec(table, head_dim, positions, share=part)
    return [found[kind] for kind in kinds]


def _heads(fields: Fields) -> list[int]:
    """Return the number of query heads of each layer."""
    layers, heads = fields.layers(), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", 8)
    given = fields.raw.get("num_attention_heads_per_layer")
    given = [heads] * layers if given is None else given
    is_list = isinstance(given, list) and len(given) == layers
    if not is_list or any(type(count) is not int or count < 1 or count % kv_heads for count in given):
        raise unsupported(
            "num_attention_heads_per_layer", given,
            f"A multiple of num_key_value_heads {kv_heads} for each of the {layers} layers.",
        )  # fmt: skip
    return given


def _gates_heads(fields: Fields) -> bool:
    """Return whether a head has one gate; otherwise each value has its own."""
    given = fields.raw.get("gating", True)
    given = True if given is None else given
    if not isinstance(given, bool | str) or given not in _GATES:
        raise unsupported("gating", given, "Supported: true, per-head, per-element.")
    return _GATES[given]


def _with_heads(layer: LayerSpec, heads: int, per_head: bool) -> LayerSpec:
    """Return the layer with `heads` query heads, and softplus as the gate of each head or of each value."""
    first, *others = layer.branches
    assert isinstance(first.sublayer, SelfAttentionSpec)
    attention = replace(
        first.sublayer, num_heads=heads, output_gate=True, gate_activation="softplus", gate_per_head=per_head
    )
    return replace(layer, branches=(replace(first, sublayer=attention), *others))


FAMILIES: dict[str, Describe] = {
    "LagunaForCausalLM": describe_laguna,
}
