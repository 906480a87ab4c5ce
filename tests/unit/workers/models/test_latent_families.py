"""Families with latent attention: published settings, defaults of transformers, and values that are refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, is_ignorable
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.rotary import inverse_frequencies
from oarlock.workers.models.hf_quantization import stored_quantization
from oarlock.workers.models.registry import describe
from oarlock.workers.preflight import _resolve_length, preflight
from oarlock.workers.quantization.formats.compressed_tensors import IntegerFormat
from oarlock.workers.quantization.formats.fp8 import FP8Format
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.models import published_latent as published

# Settings, context, and billions of parameters without layers that predict ahead.
PUBLISHED: dict[str, tuple[dict[str, Any], int, float]] = {
    "DeepSeek-V2-Lite": (published.V2_LITE, 163840, 15.71),
    "DeepSeek-V2.5": (published.V2_5, 163840, 235.74),
    "DeepSeek-V3": (published.V3, 163840, 671.03),
    "DeepSeek-V3.1": (published.V3_1, 163840, 671.03),
    "DeepSeek-V3.2": (published.V3_2, 2048, 671.03),
    "Kimi-K2": (published.KIMI_K2, 131072, 1026.41),
    "Kimi-K2-Thinking": (published.KIMI_K2_THINKING, 262144, 1026.41),
    "Kimi-K2.5": (published.KIMI_K2_5, 262144, 1026.41),
    "Moonlight-16B": (published.MOONLIGHT, 8192, 15.96),
    "GLM-4.7-Flash": (published.GLM_FLASH, 202752, 29.94),
    "GLM-5": (published.GLM_5, 2048, 743.92),
    "GLM-5.2": (published.GLM_5_2, 2048, 743.92),
    "MiniCPM3-4B": (published.MINICPM3, 32768, 4.07),
    "Youtu-LLM-2B": (published.YOUTU, 131072, 1.96),
    "A.X-K1": (published.AXK1, 131072, 518.983052288),
}
# Tens of thousands of tensors are counted for others.
_FEW_TENSORS = ("DeepSeek-V2-Lite", "GLM-4.7-Flash", "MiniCPM3-4B", "Moonlight-16B", "Youtu-LLM-2B")


def latent_of(spec: DecoderSpec) -> LatentAttentionSpec:
    """The attention of every layer."""
    attentions = {layer.attention for layer in spec.layers}
    (only,) = attentions
    assert isinstance(only, LatentAttentionSpec)
    return only


def experts_of(spec: DecoderSpec) -> ExpertsSpec:
    return next(one for one in spec.sublayers if isinstance(one, ExpertsSpec))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_read(name: str) -> None:
    config, length, _ = PUBLISHED[name]
    spec, text = describe(config), config.get("text_config", config)
    assert spec.default_length == spec.longest_length == length
    assert (spec.length_limit is None) == ("index_topk" not in text)
    assert spec.tie_word_embeddings == text.get("tie_word_embeddings", True)
    assert spec.norm.eps == text["rms_norm_eps"] and len(spec.layers) == text["num_hidden_layers"]
    attention = latent_of(spec)
    widths = (attention.num_heads, attention.nope_width, attention.rope_width, attention.kv_rank, attention.q_rank)
    keys = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank")
    assert widths == tuple(text[key] for key in keys)
    assert attention.value_dim == text.get("v_head_dim", 64) and not attention.bias
    assert attention.eps == 1e-6, "transformers passes no epsilon to the norms of latents"
    table = text.get("rope_scaling") or {}
    magnitude = 1 + 0.1 * table.get("mscale_all_dim", 0) * math.log(table.get("factor", 1))
    assert attention.scale == pytest.approx(attention.query_width**-0.5 * magnitude**2, rel=1e-9)
    ahead = f"model.layers.{len(spec.layers)}.self_attn.o_proj.weight"
    assert is_ignorable(spec, ahead) == bool(text.get("num_nextn_predict_layers"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rotations_are_those_of_transformers(name: str) -> None:
    config = PUBLISHED[name][0]
    text = config.get("text_config", config)
    rope = latent_of(describe(config)).rope
    assert rope is not None and rope.interleaved == (name != "MiniCPM3-4B") and rope.attention_factor == 1.0
    table = text.get("rope_scaling") or {}
    theta = text.get("rope_theta") or text.get("rope_parameters", {}).get("rope_theta", 10000.0)
    assert (rope.kind, rope.theta) == (table.get("type", "default"), theta)
    exponents = torch.arange(0, rope.rotary_dim, 2).float() / rope.rotary_dim
    expected, factor = 1 / theta**exponents, 1.0
    if table:
        family = DEFAULTS[text["architectures"][0]][0]
        given = {key: text[key] for key in ("max_position_embeddings", "qk_rope_head_dim", "rope_theta") if key in text}
        theirs: Any = AutoConfig.for_model(family, **given, rope_scaling=dict(table))
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(rope, exponents), expected) and factor == 1.0


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"MiniCPM3-4B", "Youtu-LLM-2B"}))
def test_published_routers_are_read(name: str) -> None:
    config = PUBLISHED[name][0]
    spec, text = describe(config), config.get("text_config", config)
    sparse = [isinstance(layer.branches[1].sublayer, ExpertsSpec) for layer in spec.layers]
    assert sparse == [index >= text["first_k_dense_replace"] for index in range(len(sparse))]
    experts, router = experts_of(spec), experts_of(spec).router
    assert (experts.experts, experts.width) == (text["n_routed_experts"], text["moe_intermediate_size"])
    assert experts.shared is not None and experts.shared.width == experts.width * text["n_shared_experts"]
    assert (router.top_k, router.scale) == (text["num_experts_per_tok"], text["routed_scaling_factor"])
    assert (router.scores, router.normalised) == (text.get("scoring_func", "sigmoid"), text["norm_topk_prob"])
    assert (router.groups, router.top_groups) == (text["n_group"], text["topk_group"])
    assert router.best_of_group == (1 if text["topk_method"] == "group_limited_greedy" else 2)
    assert (router.correction is not None) == (text["topk_method"] == "noaux_tc")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _FEW_TENSORS else pytest.mark.soak) for name in PUBLISHED]
)
def test_published_numbers_of_parameters(name: str) -> None:
    config, _, billions = PUBLISHED[name]
    spec = describe(config)
    assert spec.num_parameters == pytest.approx(billions * 1e9, rel=0.001 if name != "A.X-K1" else 1e-12)
    if name == "DeepSeek-V2-Lite":
        assert spec.cached_values == 27 * 576, "a row of 576 values in each layer: 31 KB in 16 bits"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_quantisation_is_read(name: str, tmp_path: Path) -> None:
    config = PUBLISHED[name][0]
    settings = config.get("text_config", config).get("quantization_config")
    found = stored_quantization(tmp_path, config)
    if settings is None:
        assert found is None
        return
    assert found is not None and found.method == settings["quant_method"]
    expert = found.scheme.format_of("model.layers.5.mlp.experts.3.up_proj")
    if settings["quant_method"] == "fp8":
        assert isinstance(expert, FP8Format) and expert.block == (128, 128)
    else:
        assert isinstance(expert, IntegerFormat) and (expert.bits, expert.group, expert.symmetric) == (4, 32, True)


@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-V3", "Kimi-K2", "GLM-4.7-Flash"])
def test_settings_of_rotation_may_have_the_newer_form(name: str) -> None:
    config = dict(PUBLISHED[name][0])
    table, theta = config.pop("rope_scaling") or {"type": "default"}, config.pop("rope_theta")
    newer = {key: value for key, value in table.items() if key != "type"}
    parameters = {**newer, "rope_type": table["type"], "rope_theta": theta}
    assert describe(config | {"rope_parameters": parameters}) == describe(PUBLISHED[name][0])


def test_yarn_that_changes_nothing_is_read() -> None:
    """Converters write it for models that were trained with YaRN at first."""
    table = {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0, "original_max_position_embeddings": 131072}
    config = {key: value for key, value in published.YOUTU.items() if key != "rope_parameters"}
    rope, plain = (
        latent_of(describe(config | {"rope_theta": 1600000, "rope_scaling": one})).rope for one in (table, None)
    )
    assert rope is not None and plain is not None
    exponents = torch.arange(0, 64, 2).float() / 64
    torch.testing.assert_close(inverse_frequencies(rope, exponents), inverse_frequencies(plain, exponents))
    assert rope.attention_factor == 1.0


def test_kimi_k25_is_deepseek_v3_under_either_name_of_its_class() -> None:
    text = {key: value for key, value in published.KIMI_K2_5["text_config"].items() if key != "architectures"}
    specs = [
        describe(
            {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": False}
        )
        for name in ("KimiK25", "Kimi_K25")
    ]
    assert specs[0] == specs[1] and specs[0].wrapper == "Kimi_K25ForConditionalGeneration"
    assert specs[0].layers == describe(published.KIMI_K2_5["text_config"]).layers
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
    "heads that share keys": (published.V3 | {"num_key_value_heads": 8}, "num_key_value_heads"),
    "heads of another width": (published.V3 | {"qk_head_dim": 128}, "qk_head_dim"),
    "a part of the rotated elements": (published.GLM_FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "other layers with experts": (published.V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
    "layers that only GLM lists": (published.V3 | {"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types"),
    "dense layers that transformers ignores": (
        published.GLM_FLASH | {"first_k_dense_replace": 2}, "first_k_dense_replace",
    ),
    "softmax in V3": (published.V3 | {"scoring_func": "softmax"}, "scoring_func"),
    "sigmoid in V2": (published.V2_LITE | {"scoring_func": "sigmoid"}, "scoring_func"),
    "normalised weights in V2": (published.V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob"),
    "biases in V2": (published.V2_LITE | {"mlp_bias": True}, "mlp_bias"),
    "attention without latents": (published.V2_LITE | {"use_mla": False}, "use_mla"),
    "no shared experts": (published.V3 | {"n_shared_experts": None}, "n_shared_experts"),
    "no experts": (published.V3 | {"n_routed_experts": None}, "n_routed_experts"),
    "queries scaled by their position": (published.V3 | {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
    "biases in Youtu": (published.YOUTU | {"mlp_bias": True}, "mlp_bias"),
    "an unknown method": (published.V2_LITE | {"topk_method": "noaux_tc"}, "topk_method"),
    "no latent of queries": (published.AXK1 | {"q_lora_rank": None}, "q_lora_rank"),
    "YaRN of the scores without a factor": (
        published.V3
        | {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}},
        "factor",
    ),
    "halves in V3.2": (published.V3_2 | {"rope_interleave": False}, "rope_interleave"),
    "layers without an indexer": (published.V3_2 | {"layer_types": ["full_attention"] * 61}, "layer_types"),
    "a first layer without an indexer": (
        published.V3 | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["shared"] * 61}, "indexer_types",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_change_the_result_are_refused_by_name(case: str) -> None:
    config, key = REFUSED[case]
    with pytest.raises(StartupError, match=key):
        describe(config)


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_an_indexer_limits_the_context_and_its_tensors_are_not_read(architecture: str) -> None:
    spec = describe(published.V3 | {"architectures": [architecture], "index_topk": 2048})
    assert _resolve_length(None, spec) == _resolve_length(2048, spec) == 2048
    with pytest.raises(StartupError, match=r"more than 2048 tokens: an indexer, which is not supported.*index_topk"):
        _resolve_length(2049, spec)
    assert is_ignorable(spec, "model.layers.4.self_attn.indexer.wq_b.weight_scale_inv")
    assert is_ignorable(spec, "model.layers.61.self_attn.o_proj.weight"), "a layer that predicts ahead"
    assert not is_ignorable(spec, "model.layers.4.self_attn.o_proj.weight")
    whole = describe(published.V3 | {"architectures": [architecture], "index_topk": 200_000})
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
    greedy = experts_of(describe(published.V2_LITE)).router
    limited = published.V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    grouped = experts_of(describe(limited)).router
    assert (greedy.groups, grouped.groups, grouped.top_groups, grouped.best_of_group) == (1, 8, 3, 1)
    assert not grouped.normalised and grouped.correction is None and grouped.scores == "softmax"


def test_a_x_k1_has_a_norm_after_its_experts_and_a_correction_only_by_another_method() -> None:
    spec = describe(published.AXK1)
    norms = [[branch.post_norm for branch in layer.branches] for layer in spec.layers]
    assert norms == [[None, None]] + [[None, "post_mlp_layernorm"]] * 60
    assert is_ignorable(spec, "model.layers.0.post_mlp_layernorm.weight")
    assert experts_of(spec).router.correction is None
    assert experts_of(describe(published.AXK1 | {"topk_method": "noaux_tc"})).router.correction is not None
