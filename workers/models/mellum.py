"""Mellum 2: Qwen3-MoE's layers, with another rotary table for layers with a window. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
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
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _HEAD = 131072, 128
_THETA = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}


def describe_mellum(fields: Fields) -> DecoderSpec:
    """Describe Mellum 2. The layer that predicts further ahead (`mtp`) is not served."""
    fields.check_value("use_sliding_window", True)
    kinds = layer_kinds(fields) or ["full_attention"] * fields.layers()
    ropes, bias = _ropes(fields), fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, 64, 8)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=fields.flag("norm_topk_prob", True))
    mixture = ExpertsSpec(experts, fields.count("moe_intermediate_size", 896), router, activation)
    spec = decoder_spec(
        fields,
        kv_heads=4,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=sliding_windows(fields, kinds, 1024),
        rope=ropes["full_attention"],
        ropes=[ropes[kind] for kind in kinds],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=[mixture if is_sparse else None for is_sparse in sparse_layers(fields, 0)],
        activation=activation,
    )
    return replace(spec, names=TensorNames(ignored=("mtp",)))


def _ropes(fields: Fields) -> dict[str, RopeSpec]:
    """Return the rotary settings of each kind of layer. A table that has a setting must have `rope_theta` too."""
    if fields.table("rope_scaling"):
        raise StartupError(
            "config.json: rope_scaling is not read for Mellum.", "Give each rope type in rope_parameters."
        )
    tables = fields.table("rope_parameters")
    if any(key not in _THETA for key in tables):
        raise unsupported("rope_parameters", tables, f"Mellum has one table each for {' and '.join(_THETA)}.")
    inner, head_dim = Fields(tables), head_width(fields, _HEAD)
    positions, found = fields.count("max_position_embeddings", _POSITIONS), {}
    for kind, theta in _THETA.items():
        table = inner.table(kind) or {"rope_theta": theta}
        if "rope_theta" not in table:
            raise unsupported("rope_parameters", tables, "Give rope_theta in each table.")
        found[kind] = rope_spec(table, head_dim, positions)
    return found


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Mellum's settings. The file does not record whether experts' weights add up to 1, as they always do."""
    settings.check_whole_heads(config["head_dim"])
    window, theta = settings.count(".attention.sliding_window", 0), config["rope_theta"]
    full = {"rope_theta": theta, **(config["rope_scaling"] or {})}
    own: dict[str, Any] = {
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "rope_scaling": None,
        "rope_parameters": {"full_attention": full},
    }
    if window:
        sliding = {"rope_theta": settings.number(".rope.freq_base_swa", theta)}
        own |= {"sliding_window": window, "layer_types": settings.layer_kinds(config["num_hidden_layers"])}
        own["rope_parameters"]["sliding_attention"] = sliding
    return own


GGUF_MELLUM = GGUFFamily("mellum", "MellumForCausalLM", _own, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "MellumForCausalLM": describe_mellum,
}
GGUF_FAMILIES = (GGUF_MELLUM,)
