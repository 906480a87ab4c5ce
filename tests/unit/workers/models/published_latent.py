"""Settings of published checkpoints with latent attention, as their `config.json` has them.

Left out are ids of tokens, names of code, and settings of training that no class reads.
"""

from typing import Any

_EXPERTS = {"ep_size": 1, "moe_layer_freq": 1, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
            "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16"}  # fmt: skip
_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
FP8: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                       "weight_block_size": [128, 128]}  # fmt: skip
INT4: dict[str, Any] = {
    "config_groups": {"group_0": {"input_activations": None, "output_activations": None, "targets": ["Linear"],
                                  "weights": {"actorder": None, "block_structure": None, "dynamic": False,
                                              "group_size": 32, "num_bits": 4, "observer": "minmax",
                                              "observer_kwargs": {}, "strategy": "group", "symmetric": True,
                                              "type": "int"}}},
    "format": "pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


def yarn(factor: float, weight: float, fast: float = 32, slow: float = 1) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow, "mscale": weight,
            "mscale_all_dim": weight, "original_max_position_embeddings": 4096}  # fmt: skip


V2_LITE: dict[str, Any] = {
    **_EXPERTS, **_HEADS, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "rms_norm_eps": 1e-6, "rope_scaling": yarn(40, 0.707),
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
    "topk_method": "greedy", "vocab_size": 102400,
}  # fmt: skip
V2_5 = V2_LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60,
    "q_lora_rank": 1536, "rope_scaling": yarn(40, 1.0), "routed_scaling_factor": 16.0,
    "topk_method": "group_limited_greedy",
}  # fmt: skip
V3: dict[str, Any] = {
    **_EXPERTS, **_HEADS, **_SIGMOID, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "rope_scaling": yarn(40, 1.0),
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
    "quantization_config": FP8,
}  # fmt: skip
V3_1 = V3 | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}
V3_2 = V3_1 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
    "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
KIMI_K2 = V3 | {
    "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "rope_scaling": yarn(32.0, 1.0, 1.0, 1.0), "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
KIMI_K2_THINKING = KIMI_K2 | {
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_scaling": yarn(64.0, 1.0, 1.0, 1.0),
    "quantization_config": INT4,
}  # fmt: skip
KIMI_K2_5: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
    "tie_word_embeddings": False, "use_unified_vision_chunk": True, "media_placeholder_token_id": 163605,
    "text_config": KIMI_K2_THINKING | {"rope_scaling": yarn(64.0, 1.0, 32.0, 1.0), "is_decoder": False,
                                       "add_cross_attention": False},
    "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
}  # fmt: skip
MOONLIGHT = V3 | {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    "quantization_config": None,
}  # fmt: skip
GLM_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47,
    "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "dtype": "bfloat16",
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "vocab_size": 154880,
}  # fmt: skip
GLM_5 = GLM_FLASH | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "scoring_func": "sigmoid", "ep_size": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 78, "moe_layer_freq": 1,
    "head_dim": 64, "qk_head_dim": 256, "q_lora_rank": 2048, "index_head_dim": 128, "index_n_heads": 32,
    "index_topk": 2048, "indexer_rope_interleave": True, "rope_interleave": True, "pretraining_tp": 1,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "rope_theta": None,
}  # fmt: skip
GLM_5_2 = GLM_5 | {
    "head_dim": 192, "max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3,
    "index_share_for_mtp_iteration": True, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "indexer_types": ["full" if index < 3 or index % 4 == 2 else "shared" for index in range(78)],
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}  # fmt: skip
MINICPM3: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 6400, "kv_lora_rank": 256, "max_position_embeddings": 32768, "num_attention_heads": 40,
    "num_hidden_layers": 62, "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "rms_norm_eps": 1e-5, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4,
    "torch_dtype": "bfloat16", "vocab_size": 73448, "rope_scaling": {
        "type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 32768},
}  # fmt: skip
YOUTU: dict[str, Any] = {
    **_HEADS, "architectures": ["YoutuForCausalLM"], "model_type": "youtu_llm", "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 16, "num_hidden_layers": 32,
    "num_key_value_heads": 16, "q_lora_rank": 1536, "qk_head_dim": 192, "rms_norm_eps": 1e-6, "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1600000, "rope_type": "default"}, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
# Its number of parameters shows that no correction of the router is stored; the name of the method is not known.
AXK1 = V3 | {
    "architectures": ["AXK1ForCausalLM"], "model_type": "AXK1", "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "n_routed_experts": 192, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "rope_scaling": None, "topk_method": "none", "vocab_size": 163840,
    "quantization_config": None,
}  # fmt: skip
