"""Families with latent attention: published settings, defaults of transformers, and values that are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, is_ignorable
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.models.registry import describe
from oarlock.workers.preflight import _resolve_length, preflight
from tests.golden.tiny_models import make_tiny


def yarn(factor: float, weight: float) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "beta_fast": 32, "beta_slow": 1, "mscale": weight,
            "mscale_all_dim": weight, "original_max_position_embeddings": 4096}  # fmt: skip


_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
    "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": yarn(40, 0.707),
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rope_scaling": yarn(40, 1.0), "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_V32 = _V3 | {"architectures": ["DeepseekV32ForCausalLM"]}
_KIMI_K2 = {
    **_V3, "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(32, 1.0), "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1,
    "vocab_size": 163840,
}  # fmt: skip
_GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc", "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
_MINICPM3 = {
    "architectures": ["MiniCPM3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 6400, "kv_lora_rank": 256,
    "max_position_embeddings": 32768, "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40,
    "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_emb": 12,
    "dim_model_base": 256, "scale_depth": 1.4, "vocab_size": 73448, "rope_scaling": {
        "type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 32768},
}  # fmt: skip
_YOUTU = {
    "architectures": ["YoutuForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 16,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 1600000, "v_head_dim": 128,
    "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
_AXK1 = {
    **_V3, "architectures": ["AXK1ForCausalLM"], "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    "n_routed_experts": 192, "num_attention_heads": 64, "num_key_value_heads": 64, "topk_method": "none",
    "num_nextn_predict_layers": 0, "rope_scaling": None, "vocab_size": 163840,
}  # fmt: skip
# Settings, billions of parameters without layers that predict ahead, context, and factor of the scores.
PUBLISHED: dict[str, tuple[dict[str, Any], float, int, float]] = {
    "DeepSeek-V2-Lite": (_V2_LITE, 15.71, 163840, 192**-0.5 * 1.2608**2),
    "DeepSeek-V3": (_V3, 671.03, 163840, 192**-0.5 * 1.3689**2),
    "Kimi-K2": (_KIMI_K2, 1026.41, 131072, 192**-0.5 * 1.3466**2),
    "GLM-4.7-Flash": (_GLM_FLASH, 29.94, 202752, 256**-0.5),
    "MiniCPM3-4B": (_MINICPM3, 4.07, 32768, 96**-0.5),
    "Youtu-LLM-2B": (_YOUTU, 1.96, 131072, 192**-0.5),
    "A.X-K1": (_AXK1, 518.98, 131072, 192**-0.5),
}


def latent_of(spec: DecoderSpec) -> LatentAttentionSpec:
    """The attention of every layer."""
    attentions = {layer.attention for layer in spec.layers}
    (only,) = attentions
    assert isinstance(only, LatentAttentionSpec)
    return only


def experts_of(spec: DecoderSpec) -> ExpertsSpec:
    return next(one for one in spec.sublayers if isinstance(one, ExpertsSpec))


# Tens of thousands of tensors are counted.
_LARGE = ("Kimi-K2", "A.X-K1")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in _LARGE else ()) for name in PUBLISHED]
)
def test_published_settings(name: str) -> None:
    config, billions, length, scale = PUBLISHED[name]
    spec = describe(config)
    assert spec.num_parameters == pytest.approx(billions * 1e9, rel=0.002)
    assert spec.default_length == spec.longest_length == length and spec.length_limit is None
    attention = latent_of(spec)
    assert attention.scale == pytest.approx(scale, rel=1e-4)
    assert attention.eps == 1e-6, "transformers passes no epsilon to the norms of latents"
    assert attention.rope is not None and attention.rope.attention_factor == 1.0
    assert attention.rope.interleaved == (name != "MiniCPM3-4B")
    per_token = spec.cached_values if name == "DeepSeek-V2-Lite" else 0
    assert per_token in (0, 27 * 576), "a row of 576 values in each layer: 31 KB in 16 bits"


def test_kimi_k25_is_deepseek_v3_under_either_name_of_its_class() -> None:
    text = {key: value for key, value in _KIMI_K2.items() if key != "architectures"}
    specs = [
        describe(
            {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
        )
        for name in ("KimiK25", "Kimi_K25")
    ]
    assert specs[0] == specs[1] and specs[0].wrapper == "Kimi_K25ForConditionalGeneration"
    assert specs[0].layers == describe(_KIMI_K2).layers
    with pytest.raises(StartupError, match="model_type = 'llama'"):
        describe({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"model_type": "llama"}})


DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "AXK1ForCausalLM": ("axk1", {}),
    "DeepseekV2ForCausalLM": ("deepseek_v2", {"num_experts_per_tok": 6}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {}),
    "DeepseekV32ForCausalLM": ("deepseek_v32", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {}),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", {}),
    "MiniCPM3ForCausalLM": ("minicpm3", {}),
    "YoutuForCausalLM": ("youtu", {}),
}
_SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 6,
          "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_missing_values_are_the_defaults_of_transformers(architecture: str) -> None:
    family, own = DEFAULTS[architecture]
    theirs: Any = AutoConfig.for_model(family, **_SIZES, **own)
    spec = describe({**_SIZES, **own, "architectures": [architecture]})
    attention = latent_of(spec)
    sizes = (attention.nope_width, attention.rope_width, attention.value_dim, attention.kv_rank, attention.q_rank)
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    assert sizes == tuple(getattr(theirs, key) for key in keys)
    assert attention.rope == RopeSpec("default", 1e4, sizes[1], interleaved=family != "minicpm3")
    assert spec.norm.eps == theirs.rms_norm_eps and spec.tie_word_embeddings == theirs.tie_word_embeddings
    longest = min(theirs.max_position_embeddings, getattr(theirs, "index_topk", 2**31))
    assert spec.default_length == spec.longest_length == longest
    if not spec.has_experts:
        return
    experts, router = experts_of(spec), experts_of(spec).router
    kinds = getattr(theirs, "mlp_layer_types", None)
    dense = kinds.count("dense") if kinds else theirs.first_k_dense_replace
    assert [isinstance(layer.branches[1].sublayer, ExpertsSpec) for layer in spec.layers] == [
        index >= dense for index in range(6)
    ]
    assert experts.experts == theirs.n_routed_experts and experts.width == theirs.moe_intermediate_size
    assert experts.shared is not None and experts.shared.width == experts.width * theirs.n_shared_experts
    assert (router.top_k, router.scale) == (theirs.num_experts_per_tok, theirs.routed_scaling_factor)
    assert router.normalised == bool(theirs.norm_topk_prob)
    assert (router.groups, router.top_groups) == (theirs.n_group or 1, theirs.topk_group or 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads that share keys": (_V3 | {"num_key_value_heads": 8}, "num_key_value_heads"),
    "heads of another width": (_V3 | {"qk_head_dim": 128}, "qk_head_dim"),
    "a part of the rotated elements": (_GLM_FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "other layers with experts": (_V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
    "layers that only GLM lists": (_V3 | {"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types"),
    "dense layers that transformers ignores": (_GLM_FLASH | {"first_k_dense_replace": 2}, "first_k_dense_replace"),
    "softmax in V3": (_V3 | {"scoring_func": "softmax"}, "scoring_func"),
    "sigmoid in V2": (_V2_LITE | {"scoring_func": "sigmoid"}, "scoring_func"),
    "normalised weights in V2": (_V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob"),
    "biases in V2": (_V2_LITE | {"mlp_bias": True}, "mlp_bias"),
    "an unknown method": (_V2_LITE | {"topk_method": "noaux_tc"}, "topk_method"),
    "no latent of queries": (_AXK1 | {"q_lora_rank": None}, "q_lora_rank"),
    "YaRN of the scores without a factor": (
        _V3 | {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}},
        "factor",
    ),
    "halves in V3.2": (_V32 | {"rope_interleave": False}, "rope_interleave"),
    "layers without an indexer": (_V32 | {"layer_types": ["full_attention"] * 61}, "layer_types"),
    "a first layer without an indexer": (
        _V3 | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["shared"] * 61}, "indexer_types",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_change_the_result_are_refused_by_name(case: str) -> None:
    config, key = REFUSED[case]
    with pytest.raises(StartupError, match=key):
        describe(config)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_an_indexer_limits_the_context_and_its_tensors_are_not_read(architecture: str) -> None:
    spec = describe(_V3 | {"architectures": [architecture], "index_topk": 2048})
    assert _resolve_length(None, spec) == _resolve_length(2048, spec) == 2048
    with pytest.raises(StartupError, match=r"more than 2048 tokens: an indexer, which is not supported.*index_topk"):
        _resolve_length(2049, spec)
    assert is_ignorable(spec, "model.layers.4.self_attn.indexer.wq_b.weight_scale_inv")
    assert is_ignorable(spec, "model.layers.61.self_attn.o_proj.weight"), "a layer that predicts ahead"
    assert not is_ignorable(spec, "model.layers.4.self_attn.o_proj.weight")
    whole = describe(_V3 | {"architectures": [architecture], "index_topk": 200_000})
    assert whole.length_limit is None and whole.default_length == 163840


def test_a_context_that_an_indexer_limits_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless the user has asked for no more."""
    config = WorkerConfig(str(make_tiny(tmp_path, "deepseek_v32")), device="cpu")
    caplog.clear()
    assert preflight(config).max_model_len == 48
    (line,) = caplog.messages
    assert "event=max_model_len_limited to=48 reason='an indexer" in line and "index_topk" in line
    caplog.clear()
    assert preflight(config.with_(max_model_len=48)).max_model_len == 48 and not caplog.messages


def test_the_router_of_v2_compares_groups_by_their_best_expert() -> None:
    greedy = experts_of(describe(_V2_LITE)).router
    limited = _V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    grouped = experts_of(describe(limited)).router
    assert (greedy.groups, grouped.groups, grouped.top_groups, grouped.best_of_group) == (1, 8, 3, 1)
    assert not grouped.normalised and grouped.correction is None and grouped.scores == "softmax"


def test_a_x_k1_has_a_norm_after_its_experts_and_a_correction_only_by_another_method() -> None:
    spec = describe(_AXK1)
    norms = [[branch.post_norm for branch in layer.branches] for layer in spec.layers]
    assert norms == [[None, None]] + [[None, "post_mlp_layernorm"]] * 60
    assert is_ignorable(spec, "model.layers.0.post_mlp_layernorm.weight")
    assert experts_of(spec).router.correction is None
    assert experts_of(describe(_AXK1 | {"topk_method": "noaux_tc"})).router.correction is not None
