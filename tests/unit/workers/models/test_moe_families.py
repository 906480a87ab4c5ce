"""MoE families: defaults of transformers, values that are refused by name, and stored names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, is_ignorable
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.hf_quantization import stored_quantization, weight_formats
from oarlock.workers.models.registry import describe
from oarlock.workers.quantization.formats.fp8 import FP8Format

BASE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 32,
}  # fmt: skip
DOTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere2MoeForCausalLM": ("cohere2_moe", {}),
    "Dots1ForCausalLM": ("dots1", DOTS),
    "ExaoneMoeForCausalLM": ("exaone_moe", {}),
    "FlexOlmoForCausalLM": ("flex_olmo", {}),
    "FlintForCausalLM": ("flint", {}),
    "GraniteMoeSWAForCausalLM": ("granitemoe_swa", {}),
    "HYV3ForCausalLM": ("hy_v3", {}),
    "Kolibri1ForCausalLM": ("kolibri1", {}),
    "MellumForCausalLM": ("mellum", {}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {}),
    "PhimoeForCausalLM": ("phimoe", {}),
    "SolarOpenForCausalLM": ("solar_open", {}),
}


def experts_of(spec: DecoderSpec) -> ExpertsSpec:
    return next(one for one in spec.sublayers if isinstance(one, ExpertsSpec))


def first_of(config: Any, *names: str) -> Any:
    """The first of these fields that the config has and that is not null."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_values_are_the_defaults_of_transformers(architecture: str) -> None:
    family, own = FAMILIES[architecture]
    theirs = AutoConfig.for_model(family, **BASE, **own)
    spec = describe({**BASE, **own, "architectures": [architecture]})
    assert spec.attentions[0].num_kv_heads == theirs.num_key_value_heads
    assert spec.attentions[0].head_dim == getattr(theirs, "head_dim", 128 // 32)
    assert spec.norm.eps == first_of(theirs, "rms_norm_eps", "layer_norm_eps")
    assert spec.default_length == spec.longest_length == theirs.max_position_embeddings
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 6
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.attention.window for layer in spec.layers] == windows
    for kind, layer in zip(kinds, spec.layers, strict=True):
        if layer.attention.rope is not None:
            assert layer.attention.rope.theta == theirs.rope_parameters.get(kind, theirs.rope_parameters)["rope_theta"]
    dense = [not isinstance(layer.branches[1].sublayer, ExpertsSpec) for layer in spec.layers]
    without = getattr(theirs, "mlp_only_layers", [])
    kinds = getattr(theirs, "mlp_layer_types", ["dense" if index in without else "sparse" for index in range(6)])
    assert dense == [kind == "dense" for kind in kinds]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_values_of_experts_are_the_defaults_of_transformers(architecture: str) -> None:
    family, own = FAMILIES[architecture]
    theirs = AutoConfig.for_model(family, **BASE, **own)
    experts = experts_of(describe({**BASE, **own, "architectures": [architecture]}))
    assert experts.experts == first_of(theirs, "n_routed_experts", "num_local_experts", "num_experts")
    assert experts.router.top_k == theirs.num_experts_per_tok
    assert experts.width == first_of(theirs, "moe_intermediate_size", "intermediate_size")
    scales = [getattr(theirs, f"{name}_scaling_factor", None) for name in ("routed", "router")]
    assert experts.router.scale == next((scale for scale in scales if scale is not None), 1.0)
    if family != "phimoe":
        assert experts.router.normalised == getattr(theirs, "norm_topk_prob", True)
    shared = {"exaone_moe": 1024, "hy_v3": 1536, "solar_open": 1280, "dots1": 1408, "flint": 1024, "kolibri1": 512}
    assert (experts.shared.width if experts.shared else None) == shared.get(family)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no number of experts": ("Dots1", {**DOTS, "n_routed_experts": None}, "n_routed_experts = None"),
    "scores of dots": ("Dots1", {**DOTS, "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    "more experts than all": ("MiniMaxM2", {"num_local_experts": 4}, "cannot have 8 of 4 experts"),
    "groups": ("SolarOpen", {"n_group": 3}, "cannot be chosen from 1 of 3 groups"),
    "dense layers of Solar": ("SolarOpen", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1"),
    "window of Exaone": ("ExaoneMoe", {"sliding_window": None}, "sliding_window = None"),
    "limits of K-EXAONE 2.0": ("ExaoneMoe", {"swiglu_limits": [None, 7.0]}, "swiglu_limits = "),
    "windows of K-EXAONE 2.0": ("ExaoneMoe", {"sliding_windows": [128, 4096]}, "sliding_windows = "),
    "no layer with experts": ("HYV3", {"mlp_layer_types": ["dense"] * 6}, "none has experts"),
    "kinds of MLPs": ("Mellum", {"mlp_layer_types": ["dense"]}, "mlp_layer_types = "),
    "one rotary table": ("Mellum", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = "),
    "rotary table without theta": (
        "Mellum",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
        "rope_parameters = ",
    ),
    "old rotary settings": ("Mellum", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "linear attention": ("MiniMaxM2", {"attn_type_list": [1, 0, 1, 1, 1, 1]}, "attn_type_list"),
    "norms of heads": ("MiniMaxM2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    "a shared expert": ("MiniMaxM2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 64"),
    "odd rotation": ("MiniMaxM2", {"rotary_dim": 63}, "rotary_dim = 63"),
    "rotation of more than a head": ("MiniMaxM2", {"rotary_dim": 256}, "rotary_dim = 256"),
    "biases of shared experts": ("HYV3", {"mlp_bias": True}, "mlp_bias = True"),
    "softmax": ("HYV3", {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid = False"),
    "biases of Kolibri": ("Kolibri1", {"attention_bias": True}, "attention_bias = True"),
    "thetas": ("GraniteMoeSWA", {"layer_rope_theta": [1e4]}, "layer_rope_theta = "),
    "a negative theta": ("GraniteMoeSWA", {"layer_rope_theta": [1e4] * 5 + [-1.0]}, "layer_rope_theta must be"),
    "another choice": ("Cohere2Moe", {"expert_selection_fn": "relu"}, "expert_selection_fn = 'relu'"),
    "another combination": (
        "Cohere2Moe",
        {"shared_expert_combination_strategy": "max"},
        "shared_expert_combination_strategy = 'max'",
    ),
    "three mixed experts": ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
    "two scales": (
        "Phimoe",
        {
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "short_mscale": 1.2,
                "long_mscale": 1.3, "original_max_position_embeddings": 64,
            }
        },
        "long_mscale = 1.3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_values_that_would_change_results_are_refused_by_name(what: str) -> None:
    name, change, message = REFUSED[what]
    with pytest.raises(StartupError, match=message) as error:
        describe({**BASE, "architectures": [f"{name}ForCausalLM"], **change})
    assert error.value.fix


@pytest.mark.parametrize(
    ("architecture", "ignored", "used"),
    [
        ("HYV3ForCausalLM", "model.layers.6.eh_proj.weight", "model.layers.5.mlp.expert_bias"),
        ("Cohere2MoeForCausalLM", "model.layers.6.mlp.gate.weight", "model.layers.5.mlp.gate.weight"),
        ("ExaoneMoeForCausalLM", "mtp.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
        ("ExaoneMoeForCausalLM", "blk.6.nextn.eh_proj.weight", "blk.5.attn_q.weight"),
        ("MellumForCausalLM", "mtp.fc.weight", "model.norm.weight"),
    ],
)
def test_layers_that_predict_further_ahead_are_ignored(architecture: str, ignored: str, used: str) -> None:
    spec = describe({**BASE, "architectures": [architecture], "num_nextn_predict_layers": 1})
    assert is_ignorable(spec, ignored) and not is_ignorable(spec, used)


def test_settings_of_a_quantised_minimax_are_read_by_stored_names(tmp_path: Path) -> None:
    """The published checkpoint: float8 blocks, with the router in floating point."""
    settings = {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }  # fmt: skip
    config = {**BASE, "architectures": ["MiniMaxM2ForCausalLM"], "quantization_config": settings}
    inside = "model.layers.0.block_sparse_moe."
    save_file(
        {
            f"{inside}experts.1.w2.weight": torch.zeros(128, 96).to(torch.float8_e4m3fn),
            f"{inside}experts.1.w2.weight_scale_inv": torch.ones(1, 1),
            f"{inside}gate.weight": torch.zeros(8, 128),
            f"{inside}e_score_correction_bias": torch.zeros(8),
        },
        tmp_path / "model.safetensors",
    )
    spec = describe(config)
    checkpoint = Checkpoint.open(tmp_path, spec.names)
    assert checkpoint.find("model.layers.0.mlp.e_score_correction_bias") is not None
    expert = "model.layers.0.mlp.experts.1.down_proj"
    assert checkpoint.stored_module(expert) == f"{inside}experts.1.w2"
    formats = weight_formats("fp8", stored_quantization(tmp_path, config), checkpoint)
    assert formats.format_of(expert) == FP8Format((128, 128))
    assert not isinstance(formats.format_of("model.layers.0.mlp.gate"), FP8Format)


def test_a_module_without_a_weight_keeps_its_stored_name(tmp_path: Path) -> None:
    """AWQ and GPTQ store `qweight` instead of `weight`."""
    spec = describe({**BASE, "architectures": ["MiniMaxM2ForCausalLM"]})
    stored = "model.layers.0.block_sparse_moe.experts.1.w2"
    save_file({f"{stored}.qweight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, spec.names)
    assert checkpoint.stored_module("model.layers.0.mlp.experts.1.down_proj") == stored
