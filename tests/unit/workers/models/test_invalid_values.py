"""Any value in a `config.json` gives an error that names the key, or a description that can be computed with.

Every key of every family with every odd value, then several keys at once.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, tensor_shapes
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.rotary import RotaryTable
from oarlock.workers.models.hf_fields import _NEUTRAL, MOST, MOST_LAYERS, Fields
from oarlock.workers.models.registry import FAMILIES, describe

ODD: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 7, 10**10, 10**400, -(10**400), 2**31 - 1, 2**31, 2**63,
    0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-300, 5e-324, 1e300, math.nan, math.inf, -math.inf,
    "", "abc", "false", "1", "null", "x" * 5000, "a\nb", "\ud800",
    [], [1], [1.0] * 4, [math.nan] * 4, ["full_attention"] * 3, [None], [[[]]],
    {}, {"a": None}, {"type": "yarn"}, {"rope_type": []}, {"rope_type": 0}, {"factor": "2"},
]  # fmt: skip

_SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
}  # fmt: skip
_KEYS = {
    *_SHAPE,
    "architectures", "dtype", "torch_dtype", "hidden_act", "hidden_activation", "tie_word_embeddings", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "original_max_position_embeddings",
    "partial_rotary_factor", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "quantization_config", "num_experts", "logits_scaling", "layer_norm_eps", "logit_scale", "use_qk_norm",
    "use_parallel_block", "num_experts_per_tok", "mlp_only_layers", "decoder_sparse_step", "n_embd", "n_layer",
    "n_head", "n_positions", "n_inner", "activation_function", "layer_norm_epsilon", "multi_query",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention",
    "do_layer_norm_before", "word_embed_proj_dim", "ffn_dim", "enable_bias", "layer_norm_elementwise_affine",
    "rotary_pct", "rotary_emb_base", "rotary_dim", "num_layers", "num_heads", "window_size", "attention_layers",
    "attention_types", "n_group", "topk_group", "routed_scaling_factor", "moe_layer_end_index", "moe_norm_min",
    "residual_multiplier", "norm_eps", "norm_epsilon", "clip_qkv", "attention_multiplier", "embedding_multiplier",
    "attention_out_bias", "use_bias", "qkv_bias", "bias", "no_rope_layers", "no_rope_layer_interval",
    "layer_rope_theta", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "use_post_norm", "moe_topk",
    "num_shared_expert", "route_scale", "num_dense_layers", "num_shared_experts", "mup_enabled",
    "global_attn_every_n_layers", "attention_chunk_size", "floor_scale", "attn_scale", "attn_temperature_tuning",
    "moe_layers", "interleave_moe_layer_step", "intermediate_size_mlp", "first_k_dense_replace", "mlp_layer_types",
    "moe_intermediate_size", "norm_topk_prob", "n_shared_experts", "shared_expert_intermediate_size",
    "router_scaling_factor", "prefix_dense_intermediate_size", "expert_selection_fn", "num_nextn_predict_layers",
    "attn_type_list", "router_jitter_noise", "conv_L_cache", "conv_bias", "block_ff_dim", "block_multiple_of",
    "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "full_attn_idxs", "use_expert_bias", "tie_embedding",
    "use_sandwich_norm", "use_attention_gate", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "num_kv_shared_layers", "attention_k_eq_v", "num_global_key_value_heads", "global_head_dim", "per_layer_config",
    "use_double_wide_mlp", "gating", "num_attention_heads_per_layer", "moe_routed_scaling_factor", "v_head_dim",
    "attention_value_scale", "sliding_window_size", "hybrid_layer_pattern", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "linear_allow_neg_eigval", "full_attention_interval", "attn_output_gate", "linear_attn_config", "linear_num_heads",
    "linear_head_dim", "model_max_length", "moe_renormalize", "num_expert_group", "num_experts_per_token",
    "layer_group_size", "kda_safe_gate", "kda_lower_bound", "short_conv_kernel_size", "num_mtp_layers",
    "kv_lora_rank", "q_lora_rank", "moe_shared_expert_intermediate_size", "num_kv_heads_for_linear_attn",
    "expert_swiglu_limit_list", "no_kda_lora", "gated_attention_proj_granularity_type",
    "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "rope_interleave", "scale_emb", "scale_depth",
    "dim_model_base", "index_topk", "indexer_types", "topk_method", "scoring_func", "moe_layer_freq",
    "ffn_hidden_size", "expert_ffn_hidden_size", "zero_expert_num", "zero_expert_type", "router_bias",
    "mla_scale_q_lora",
}  # fmt: skip
_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.6, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
_ROPE_KEYS = {
    "rope_theta", "original_max_position_embeddings", "attention_factor", "partial_rotary_factor", "rope_type", "type",
    "unknown", "alpha", "llama_4_scaling_beta", *(key for table in _ROPES.values() for key in table),
}  # fmt: skip
_OLDER = (
    "BioGptForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM", "OPTForCausalLM",
)  # fmt: skip
_MIXTURES = (
    "Moe", "MoE", "MoeShared", "MoeSWA", "Mixtral", "Olmoe", "GptOss", "Dots1", "SolarOpen", "FlexOlmo", "HYV3",
    "MiniMaxM2", "Mellum", "Flint", "Kolibri1", "Phimoe", "Afmoe", "HunYuanMoEV1", "Llama4", "Qwen3Next", "Laguna",
    "MiMoV2Flash", "AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa",
)  # fmt: skip
_LATENT = ("AXK1", "DeepseekV", "Glm4MoeLite", "GlmMoeDsa", "LongcatFlash", "MiniCPM3", "Youtu")
_OF_LATENT = {"num_key_value_heads": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
              "kv_lora_rank": 16, "q_lora_rank": 20, "n_group": 2, "topk_group": 1,
              "first_k_dense_replace": 1}  # fmt: skip
_OF_LONGCAT = {"num_layers": 2, "num_hidden_layers": None, "intermediate_size": None, "n_routed_experts": 4,
               "moe_topk": 2, "zero_expert_num": 3, "moe_intermediate_size": None}  # fmt: skip
# Families with a rotary table for each kind of layer or without rotation, and without `rope_scaling`.
_TABLES = ("CohereCompass", "Gemma4", "KimiLinear", "Laguna", "Lfm3", "Mamba2", "MiMoV2Flash", "NemotronH")
# Keys that are read without a method of `Fields`.
_RAW = {"architectures", "layer_types", "rope_scaling"}
_RAW_OF_LAYERS = {
    "Lfm2": {"full_attn_idxs"}, "Gemma4": {"per_layer_config"}, "Laguna": {"gating", "num_attention_heads_per_layer"},
    "MiMoV2Flash": {"hybrid_layer_pattern"}, "GlmMoeDsa": {"indexer_types"},
    "LongcatFlash": {
        "attention_bias", "expert_ffn_hidden_size", "ffn_hidden_size", "hidden_act", "hidden_size", "kv_lora_rank",
        "max_position_embeddings", "mla_scale_q_lora", "moe_topk", "num_attention_heads", "qk_head_dim",
        "qk_nope_head_dim", "qk_rope_head_dim", "rms_norm_eps", "rope_theta", "routed_scaling_factor", "router_bias",
        "v_head_dim", "vocab_size", "zero_expert_num", "zero_expert_type",
    },
    "Bamba": {"attn_layer_indices", "mamba_d_head", "time_step_limit"},
    "FalconH1": {"mlp_multipliers", "ssm_multipliers", "mamba_d_ssm", "time_step_limit"},
    "Bailing": {"expert_swiglu_limit_list", "kda_lower_bound"},
    "GraniteMoeHybrid": {"mamba_d_head", "time_step_limit"}, "Mamba2": {"time_step_limit"},
    "NemotronH": {
        "layers_block_type", "hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel",
        "ssm_state_size", "mlp_hidden_act", "time_step_min", "moe_shared_expert_intermediate_size", "use_bias",
        "use_conv_bias", "mlp_bias", "mamba_proj_bias", "moe_intermediate_size", "layer_norm_epsilon",
    },
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
_OF_MAMBA: dict[str, dict[str, Any]] = {
    "Bamba": {**_MAMBA, "attn_layer_indices": [0]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 128, "time_step_limit": [0.1, 2.0]},
    "GraniteMoeHybrid": {**_MAMBA, "num_local_experts": 0},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "NemotronH": {"mamba_num_heads": 8, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 8,
                  "num_experts_per_tok": 2, "sliding_window": None},
}  # fmt: skip
_KIMI = {
    "num_key_value_heads": 8, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
}  # fmt: skip
_OF_KIMI: dict[str, dict[str, Any]] = {
    "KimiLinear": {**_KIMI, "linear_attn_config": {"head_dim": 16, "num_heads": 8}, "rope_scaling": None},
    **{name: {**_KIMI, "layer_group_size": 3} for name in ("BailingHybrid", "BailingMoeV3")},
}
_RAW_OF_EXPERTS = {"attn_type_list", "layer_rope_theta", "mlp_layer_types", "mlp_only_layers"}
# Keys whose invalid value may be reported under another key, which is derived from it.
_FOLLOWS = {
    "hidden_size": "head_dim",
    "num_attention_heads": "num_key_value_heads",
    "num_hidden_layers": "layer_types",
    "max_position_embeddings": "original_max_position_embeddings",
    "partial_rotary_factor": "short_factor",
    "use_sliding_window": "sliding_window",
    "block_multiple_of": "block_",
    "block_ffn_dim_multiplier": "block_",
    "low_freq_factor": "high_freq_factor",
    "rotary_pct": "partial_rotary_factor",
    "rope_scaling": "rope",
    "rope_parameters": "rope",
    "rope_type": "rope type",
    "type": "rope type",
    "factor": "factor",
    "linear_key_head_dim": "linear_value_head_dim",
    "qk_rope_head_dim": "head_dim",
    "moe_topk": "num_experts_per_tok",
}


def has_experts(architecture: str) -> bool:
    return architecture.removesuffix("ForCausalLM").endswith(_MIXTURES)


def base(architecture: str) -> dict[str, Any]:
    name = architecture.removesuffix("ForCausalLM")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1}
    own: dict[str, Any] = experts if has_experts(architecture) else {}
    if name == "CohereCompass":  # which has a table for each kind of layer
        own = {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}
    if name.startswith("Lfm2"):
        own |= {"layer_types": ["conv", "full_attention", "conv"]}
    elif name == "MiMoV2Flash":
        own |= {"n_shared_experts": None}
    own |= _OF_MAMBA.get(name, {}) | _OF_KIMI.get(name, {})
    own |= _OF_LATENT if name.startswith(_LATENT) else {}
    own |= _OF_LONGCAT if name == "LongcatFlash" else {}
    if name.startswith("Qwen3") and ("Next" in name or "_5" in name):
        own["full_attention_interval"] = 2
    # The tables of LongRoPE are those of whole heads.
    share = {"MiMoV2Flash": 0.334, "Bamba": 0.5}.get(name, 1.0)
    own |= {"partial_rotary_factor": share, "use_sliding_window": name != "IQuestCoder"}
    if architecture in _OLDER:  # all heads have keys of their own, or one for all
        own |= {"num_key_value_heads": None, "head_dim": None, "rotary_pct": 1.0, "rotary_emb_base": 5e5}
        own |= {"rotary_dim": 4, "attention_layers": ["global", "local", "global"]}
    return {**_SHAPE, **own, "architectures": [architecture], "sliding_window": own.get("sliding_window", 16)}


def check(config: dict[str, Any]) -> StartupError | None:
    """Describe it, and compute with what comes out; the refusal if there is one. Anything else is raised."""
    try:
        spec = describe(config)
    except StartupError as error:
        assert error.exit_code == 3 and error.fix
        assert len(error.cause) < 400 and error.cause.isprintable(), error.cause
        return error
    assert_usable(spec)
    return None


@cache
def assert_usable(spec: DecoderSpec) -> None:
    counts = (
        spec.vocab_size,
        spec.hidden_size,
        *(count for one in spec.attentions for count in (one.num_heads, one.num_kv_heads, one.head_dim)),
    )
    widths = [one.width for one in spec.sublayers if isinstance(one, ExpertsSpec)]
    widths += [one.intermediate_size for one in spec.sublayers if isinstance(one, GatedMLPSpec | MLPSpec)]
    for count in (*counts, *widths, spec.default_length, spec.longest_length):
        assert type(count) is int and 0 < count <= MOST
    assert spec.longest_length >= spec.default_length
    assert spec.num_layers <= MOST_LAYERS
    kinds = spec.attentions
    latents = [one for one in spec.sublayers if isinstance(one, LatentAttentionSpec)]
    widths = [width for one in latents for width in (one.kv_rank, one.nope_width, one.value_dim, one.q_rank or 1)]
    assert all(type(width) is int and 0 < width <= MOST for width in widths)
    windows = [kind.window for kind in kinds]
    windows += [kind.chunk for kind in kinds]
    windows += [None if kind.query_scale is None else kind.query_scale.period for kind in kinds]
    assert all(window is None or (type(window) is int and 0 < window <= MOST) for window in windows)
    assert all(kind.query_scale is None or 0 < kind.query_scale.beta < math.inf for kind in kinds)
    assert spec.tp_sizes[0] == 1
    if spec.num_layers < 100:
        assert spec.num_parameters > 0 and tensor_shapes(spec)
    optional = [spec.logit_softcap, *(number for one in kinds for number in (one.softcap, one.clip_qkv))]
    numbers = [
        spec.norm.eps,
        *(one.scale for one in (*kinds, *latents)),
        *(number for number in optional if number is not None),
    ]
    assert all(type(number) is float and 0 < number < math.inf for number in numbers), numbers
    for rope in {kind.rope for kind in (*kinds, *latents)}:
        if rope is None or rope.rotary_dim > 1024:
            continue
        for length in (1, spec.longest_length):
            reach = rope.for_length(length)
            table = RotaryTable(reach, torch.device("cpu"))
            frequencies = table._dynamic(torch.tensor([length - 1])) if rope.kind == "dynamic" else table.inv_freq
            assert torch.isfinite(frequencies * (length - 1) * reach.attention_factor).all()


def odd_configs(architecture: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Configurations with odd values, each with its odd key.

    Of rotations, which are read in one place, each family has two kinds in turn, and of odd values every second one.
    A key that neither the family nor the check of all other keys reads cannot change anything.
    """
    fields = Fields(base(architecture))
    FAMILIES[architecture](fields)
    raw = _RAW | (_RAW_OF_EXPERTS if has_experts(architecture) else set())
    raw |= {key for name, keys in _RAW_OF_LAYERS.items() if architecture.startswith(name) for key in keys}
    keys = sorted(_KEYS & (fields._read | _NEUTRAL.keys() | raw))
    kinds, turn = list(_ROPES), list(FAMILIES).index(architecture)
    kinds = kinds[turn % 3 :: 3]
    if architecture.startswith("Phi"):  # it has no others, whatever else is said
        kinds = ["default", "longrope"]
    elif architecture.startswith(_TABLES):
        kinds = []
    elif architecture.startswith("Bamba"):  # which rotates half of a head
        kinds = [kind for kind in kinds if kind != "longrope"]
    for value in ODD[turn % 2 :: 2]:
        for key in keys:
            yield key, {**base(architecture), key: value}
        for kind in kinds:
            table = _ROPES[kind]
            if architecture in ("PhiMoEForCausalLM", "PhimoeForCausalLM") and kind == "longrope":
                table = table | {"short_mscale": 1.2, "long_mscale": 1.2}
            for key in sorted(_ROPE_KEYS):
                yield (
                    key,
                    {**base(architecture), "rope_theta": 5e5, "rope_scaling": {"type": kind, **table, key: value}},
                )


# Families that read their settings as others do.
_LIKE_OTHERS = (
    "BailingHybridForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
    "YoutuForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=pytest.mark.soak if name in _LIKE_OTHERS else ()) for name in FAMILIES]
)
@pytest.mark.slow
def test_an_odd_value_is_refused_by_its_key_or_can_be_computed_with(architecture: str) -> None:
    refused, configs = 0, list(odd_configs(architecture))
    for key, config in configs:
        error = check(config)
        if error is not None and key != "architectures":
            said = f"{error.cause} {error.fix}"
            assert key in said or _FOLLOWS.get(key, key) in said or "rope type" in said, (key, config, said)
            refused += 1
    assert refused > len(configs) // 3  # about half are


values = st.sampled_from(ODD) | st.integers(-3, 70_000) | st.floats(0, 1e6) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(_ROPE_KEYS)), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(sorted(_KEYS)), values, max_size=4),
    st.sampled_from(sorted(_ROPES)),
    st.dictionaries(st.sampled_from(sorted(_ROPE_KEYS)), values, max_size=3),
)
@pytest.mark.slow
def test_so_are_several_at_once(architecture: str, outer: dict, kind: str, inner: dict) -> None:
    check({**base(architecture), "rope_scaling": {"type": kind, **_ROPES[kind], **inner}, **outer})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4, "mscale": math.nan, "mscale_all_dim": 1}}, "mscale"),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": "abc"}, "max_window_layers.*'abc'"),
        ({"rope_theta": 10**400}, "rope_theta must be between .* an integer of more than 40 digits"),
        (
            {"rope_scaling": {**_ROPES["longrope"], "type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be an integer between 2",
        ),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers must be at most 10000"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": "false"}}, "truncate must be true or false"),
    ],
)
def test_invalid_values_are_startup_errors(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**base("LlamaForCausalLM"), **config})


def theta(config: dict[str, Any]) -> float:
    attention = describe(config).layers[0].attention
    assert attention is not None and attention.rope is not None
    return attention.rope.theta


def test_a_null_inside_is_as_if_it_were_not_there() -> None:
    config = {**base("LlamaForCausalLM"), "rope_theta": 5e5}
    assert theta({**config, "rope_scaling": {"rope_theta": None, "type": "default"}}) == 5e5
    gemma = {**base("Gemma3ForCausalLM"), "rope_theta": None, "layer_types": ["full_attention"] * 3}
    assert theta({**gemma, "rope_parameters": {"full_attention": {"rope_theta": None}}}) == 1e6
