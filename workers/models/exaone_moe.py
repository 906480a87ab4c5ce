"""K-EXAONE: norms of heads, rotation only in layers with a window, GLM-4.5's router and shared experts. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    activation_name,
    decoder_spec,
    expert_counts,
    layer_kinds,
    sliding_windows,
    usual_rope,
)
from oarlock.workers.models.hf_experts import gguf_grouped, grouped_router, layers_ahead, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS = 2048
_CORRECTION = "e_score_correction_bias"
_NAMES = {f"model.layers.*.mlp.{_CORRECTION}": f"model.layers.*.mlp.gate.{_CORRECTION}"}


def describe_exaone_moe(fields: Fields) -> DecoderSpec:
    """Describe K-EXAONE. Layers that predict further ahead (`mtp`) are not served."""
    fields.check_value("scoring_func", "sigmoid")
    layers, kinds = fields.layers(), layer_kinds(fields)
    if kinds is None:
        every = fields.count("sliding_window_pattern", 4)
        kinds = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    windows, rope = sliding_windows(fields, kinds, 4096), usual_rope(fields, None, _POSITIONS)
    activation = activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 64, 8)
    width, shared = fields.count("moe_intermediate_size", 1024), fields.count("num_shared_experts", 1)
    router = grouped_router(fields, experts, top_k, scale=2.5)
    mixture = ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width))
    spec = decoder_spec(
        fields,
        kv_heads=32,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=[None if window is None else rope for window in windows],
        qk_norm="head",
        experts=[mixture if is_sparse else None for is_sparse in sparse_layers(fields, 1)],
        activation=activation,
        eps=1e-5,
    )
    return replace(spec, names=TensorNames(modules=_NAMES, ignored=("mtp", *layers_ahead(fields))))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    own = gguf_grouped(settings, config)
    return own | {
        "num_shared_experts": settings.count(".expert_shared_count"),
        "sliding_window": settings.count(".attention.sliding_window"),
        "layer_types": settings.layer_kinds(own["num_hidden_layers"]),
    }


GGUF_EXAONE_MOE = GGUFFamily("exaone-moe", "ExaoneMoeForCausalLM", _own, "exaone_moe", has_experts=True)


FAMILIES: dict[str, Describe] = {
    "ExaoneMoEForCausalLM": describe_exaone_moe,  # the name in published checkpoints
    "ExaoneMoeForCausalLM": describe_exaone_moe,
}
GGUF_FAMILIES = (GGUF_EXAONE_MOE,)
