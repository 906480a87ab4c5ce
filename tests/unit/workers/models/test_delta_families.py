"""Published configs of models with gated delta nets or Kimi delta attention: layers, memory, sizes, and settings that
are refused."""

from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.models.registry import describe

_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_SECTIONS = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
          "linear_num_key_heads": 16}  # fmt: skip
QWEN_TEXT: dict[str, Any] = {
    **_DELTA, "linear_num_value_heads": 16, "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "vocab_size": 248320, "mamba_ssm_dtype": "float32", "rope_parameters": {**_ROPE, **_SECTIONS},
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
    "text_config": QWEN_TEXT, "vision_config": {},
}  # fmt: skip
NEXT = {
    **_DELTA, "architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 32, "decoder_sparse_step": 1,
    "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_scaling": None,
    "shared_expert_intermediate_size": 512, "vocab_size": 151936, "max_position_embeddings": 262144,
}  # fmt: skip
OLMO = {
    "architectures": ["OlmoHybridForCausalLM"], "hidden_size": 3840, "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30, "vocab_size": 100352, "max_position_embeddings": 65536,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}  # fmt: skip
_LISTS = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
          "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
        **_LISTS, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
    "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
LING: dict[str, Any] = {
    "architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 2560,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 42, "num_attention_heads": 32,
    "num_experts": 512, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 2, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 6000000, "head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_safe_gate": True,
    "kda_lower_bound": -5.0, "vocab_size": 157184, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Published, with the class of the authors' code and settings that transformers does not read.
TINY: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "hidden_size": 1536,
    "intermediate_size": 4608, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_kv_heads_for_linear_attn": 0,
    "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1, "moe_router_enable_expert_bias":
    True, "score_function": "sigmoid", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "router_dtype": "fp32",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 128,
    "rope_theta": 6000000, "rotary_dim": 64, "partial_rotary_factor": 0.5, "rope_interleave": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 6000000, "partial_rotary_factor": 0.5},
    "gated_attention_proj_granularity_type": "head_wise", "layer_group_size": 4, "group_norm_size": 1,
    "short_conv_kernel_size": 4, "no_kda_lora": True, "use_kda_lora": False, "kda_safe_gate": True,
    "kda_lower_bound": -5, "linear_silu": True, "use_qk_norm": True, "use_mla_nope": False, "use_bias": False,
    "use_qkv_bias": False, "num_nextn_predict_layers": 0, "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None, "tie_word_embeddings": False, "vocab_size": 157184,
}  # fmt: skip


def delta_of(spec: DecoderSpec) -> GatedDeltaSpec:
    first = spec.layers[0].branches[0].sublayer
    assert isinstance(first, GatedDeltaSpec)
    return first


@pytest.mark.parametrize(
    ("config", "parameters", "attentions", "tp_sizes"),
    [(QWEN, 0.75e9, 6, [1, 2, 4, 8]), (NEXT, 79.7e9, 12, [1, 2, 4, 8, 16]), (OLMO, 7.4e9, 8, [1, 2])],
    ids=["qwen3.5-0.8b", "qwen3-next-80b", "olmo-hybrid-7b"],
)
def test_published_models(config: dict[str, Any], parameters: float, attentions: int, tp_sizes: list[int]) -> None:
    spec = describe(config)
    assert spec.num_parameters == pytest.approx(parameters, rel=0.02)
    assert sum(layer.attention is not None for layer in spec.layers) == attentions
    assert all(isinstance(layer.branches[0].sublayer, GatedDeltaSpec) for layer in spec.layers[:3])
    assert spec.layers[3].attention is not None
    assert spec.tp_sizes[: len(tp_sizes)] == tp_sizes
    slots, pages = spec.groups
    assert isinstance(slots.memory, SlotsSpec) and isinstance(pages.memory, PagesSpec)
    assert len(slots.layers) + len(pages.layers) == spec.num_layers


def test_the_state_of_qwen_3_5() -> None:
    """A float32 matrix for each head, and three inputs of the convolution in the dtype of the model."""
    memory = delta_of(describe(QWEN)).memory
    assert memory.bytes_of_rank(1, "bfloat16") == 16 * 128 * 128 * 4 + 3 * 3 * 2048 * 2
    assert 4 * memory.bytes_of_rank(4, "bfloat16") == memory.bytes_of_rank(1, "bfloat16")


def test_sections_of_positions_and_a_part_of_each_head() -> None:
    attention = describe(QWEN).attentions[0]
    assert attention.output_gate and attention.rope is not None
    assert (attention.rope.kind, attention.rope.rotary_dim, attention.rope.theta) == ("default", 64, 1e7)
    assert describe({**QWEN_TEXT, "architectures": ["Qwen3_5ForCausalLM"]}).attentions[0] == attention


@pytest.mark.parametrize("config", [QWEN, {**QWEN_TEXT, "architectures": ["Qwen3_5ForCausalLM"]}], ids=["all", "text"])
def test_names_of_a_text_model_may_be_the_multimodal_models(config: dict[str, Any]) -> None:
    names = describe(config).names
    for before in ("model.layers", "model.language_model.layers"):
        assert names.rename(f"{before}.0.linear_attn.A_log") == "model.layers.0.linear_attn.A_log"
    assert names.rename("mtp.layers.0.self_attn.q_proj.weight") is None
    assert names.rename("model.visual.blocks.0.norm1.weight") is None


def test_olmo_hybrid_norms_before_gated_delta_nets_and_after_attention() -> None:
    spec = describe(OLMO)
    norms = [[(branch.norm, branch.post_norm) for branch in layer.branches] for layer in spec.layers[2:4]]
    assert norms == [
        [("input_layernorm", None), ("post_attention_layernorm", None)],
        [(None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")],
    ]
    assert all(one.rope is None for one in spec.attentions)
    delta = delta_of(spec)
    assert (delta.key_width, delta.value_width, delta.eps, delta.doubles_beta) == (96, 192, 1e-5, True)


def test_kimi_linear_has_an_unrotated_latent_attention_in_the_layers_of_its_list() -> None:
    spec = describe(KIMI)
    assert spec.num_parameters == pytest.approx(49.1e9, rel=0.01) and spec.longest_length == 2**20
    kinds = [layer.branches[0].sublayer for layer in spec.layers]
    assert [n for n, kind in enumerate(kinds, 1) if not isinstance(kind, KimiDeltaSpec)] == _LISTS["full_attn_layers"]
    attention, delta = kinds[3], kinds[0]
    assert isinstance(attention, LatentAttentionSpec) and isinstance(delta, KimiDeltaSpec)
    assert attention.rope is None and attention.scale == 192**-0.5 and attention.q_rank is None
    assert (delta.decay_rank, delta.gate_rank, delta.lower_bound, delta.eps) == (128, 128, None, 1e-5)
    assert delta.memory.bytes_of_rank(1, "bfloat16") == 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2
    names = spec.names.rename
    stored, ours = "model.layers.1.block_sparse_moe", "model.layers.1.mlp"
    assert names(f"{stored}.experts.3.w2.weight") == f"{ours}.experts.3.down_proj.weight"
    assert names(f"{stored}.gate.weight") == f"{ours}.gate.weight"
    unlisted = {**KIMI, "linear_attn_config": {}, "num_hidden_layers": 9}
    is_full = [layer.attention is not None for layer in describe(unlisted).layers]
    assert [number for number, one in enumerate(is_full) if one] == [4, 8]


def test_ling_has_bounded_decays_and_a_gate_of_each_head() -> None:
    spec = describe(LING)
    assert spec.num_parameters == pytest.approx(124.5e9, rel=0.02)
    attention, delta = spec.layers[5].branches[0].sublayer, spec.layers[0].branches[0].sublayer
    assert isinstance(attention, LatentAttentionSpec) and isinstance(delta, KimiDeltaSpec)
    assert sum(layer.attention is not None for layer in spec.layers) == 7
    assert attention.output_gate and attention.rope is not None and attention.rope.interleaved
    assert attention.rope.theta == 6e6 and describe({**LING, "rope_theta": None}) == spec
    assert (delta.decay_rank, delta.gate_rank, delta.lower_bound, delta.eps) == (None, None, -5.0, 1e-6)
    names = spec.names.rename
    assert names("model.word_embeddings.weight") == "model.embed_tokens.weight"
    assert names("model.layers.0.attention.A_log") == "model.layers.0.self_attn.A_log"
    assert names("model.layers.5.attention.dense.weight") == "model.layers.5.self_attn.o_proj.weight"
    assert names("model.layers.42.attention.dense.weight") is None


def test_the_published_class_of_ling_has_a_latent_of_queries_and_rotates_all_of_the_rotated_width() -> None:
    spec = describe(TINY)
    assert spec.num_parameters == pytest.approx(7.9e9, rel=0.02)
    attention, delta = spec.layers[3].branches[0].sublayer, spec.layers[0].branches[0].sublayer
    assert isinstance(attention, LatentAttentionSpec) and isinstance(delta, KimiDeltaSpec)
    assert [number for number, layer in enumerate(spec.layers) if layer.attention is not None] == [*range(3, 24, 4)]
    assert (attention.q_rank, attention.rope_width, attention.scale) == (256, 64, 192**-0.5)
    assert attention.rope is not None and (attention.rope.rotary_dim, attention.rope.theta) == (64, 6e6)
    assert (delta.num_heads, delta.head_width, delta.lower_bound) == (16, 128, -5.0)
    names, gate = spec.names.rename, "model.layers.1.mlp.gate"
    assert names(f"{gate}.expert_bias") == f"{gate}.e_score_correction_bias"
    unlimited = {key: [0.0] * 23 + [None] for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")}
    assert describe({**TINY, **unlimited}) == spec
    assert describe({**TINY, "head_dim": 64, "linear_head_dim": 128}) == spec  # as transformers stores it


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (KIMI, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (KIMI, {"linear_attn_config": {"lower_bound": -5.0}}, "linear_attn_config: lower_bound"),
        (KIMI, {"linear_attn_config": {**_LISTS, "full_attn_layers": [4, 5]}}, "Each of the 27 layers"),
        (KIMI, {"linear_attn_config": {**_LISTS, "kda_layers": [0]}}, "numbers from 1 to 27"),
        (KIMI, {"n_group": 4}, "num_expert_group and n_group differ"),
        (KIMI, {"norm_topk_prob": False}, "moe_renormalize"),
        (LING, {"kda_lower_bound": 5.0}, "kda_lower_bound"),
        (LING, {"kda_lower_bound": -1e-50}, "kda_lower_bound"),  # 0 in float32, which means no bound
        (TINY, {"expert_swiglu_limit_list": [0] * 22 + [4, 4]}, "expert_swiglu_limit_list"),
        (TINY, {"share_expert_swiglu_limit_list": [0] * 23 + [7.0]}, "share_expert_swiglu_limit_list"),
        (TINY, {"no_kda_lora": False}, "no_kda_lora"),
        (TINY, {"use_mla_nope": True}, "use_mla_nope"),
        (TINY, {"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity_type"),
        (TINY, {"moe_shared_expert_intermediate_size": 1024}, "moe_shared_expert_intermediate_size"),
        (TINY, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        (TINY, {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        (TINY, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        (TINY, {"rotary_dim": 32}, "rotary_dim"),
        (TINY, {"num_kv_heads_for_linear_attn": 4}, "num_kv_heads_for_linear_attn"),
        (TINY, {"num_hidden_layers": 26}, "layer_group_size"),  # transformers and the authors' code differ
        (KIMI, {"mla_use_output_gate": True}, "mla_use_output_gate"),  # Kimi K3
        (KIMI, {"attn_res_block_size": 12}, "attn_res_block_size"),
        (KIMI, {"linear_attn_config": {"kda_layers": _LISTS["kda_layers"]}}, "linear_attn_config: full_attn_layers"),
        (LING, {"rope_interleave": False}, "rope_interleave"),
        (KIMI, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (LING, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        (LING, {"score_function": "softmax"}, "score_function"),
    ],
)
def test_settings_of_kimi_delta_attention_that_are_refused(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**config, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"linear_num_value_heads": 24}, "24 value heads cannot share 16 key heads"),
        ({"layer_types": ["linear_attention"] * 24}, "layer_types"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**QWEN, "text_config": {**QWEN_TEXT, **change}})
