"""Settings that small models of some classes need beside small sizes, by `model_type`.

Families with a page have theirs in `tests/golden/tiny_models.py` and `tiny_wrappers.py`.
"""

from typing import Any

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MIXED = ["linear_attention", "hybrid"] * 2
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_SMALL_VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "xlm-roberta": {"is_decoder": True},
    "camembert": {"is_decoder": True},
    "electra": {"is_decoder": True},
    "ernie": {"is_decoder": True},
    "data2vec-text": {"is_decoder": True},
    "roberta-prelayernorm": {"is_decoder": True},
    "xlm-roberta-xl": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "gemma3n_text": {"layer_types": _ALTERNATING, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "pad_token_id": 0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": {"head_dim": 8, "num_layers": 2},
    "modernbert-decoder": {"layer_types": _ALTERNATING},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "persimmon": {"partial_rotary_factor": 0.5},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 1000,
                       "indexer_compress_ratio": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "zamba": {"layers_block_type": _MIXED, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": _MIXED, "n_mamba_heads": 4, "mamba_expand": 2, "mamba_ngroups": 2,
               "num_mem_blocks": 1, "attention_hidden_size": 128, "attention_head_dim": 32},
    "zaya": {"sliding_window": 7, "num_experts_per_tok": 1, "router_hidden_size": 32,
             "layer_types": ["hybrid", "hybrid_sliding"] * 2},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "rope_parameters": {
        **_DEFAULT_ROPE, "mrope_section": [3, 3, 2]}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4, "head_dim": 0, "qk_rope_head_dim": 0, "index_topk": 48},
    "cpmant": {"dim_ff": 96, "dim_head": 16},
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 32, "shape_vocab_size": 32,
                 "pronunciation_embed_dim": 16, "shape_embed_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "mistral4": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 1 / 3}},
    "step3p5": {"sliding_window": 7, "num_sliding_attention_heads": 8, "share_expert_dim": 32,
                "layer_types": _ALTERNATING, "rope_parameters": {
                    "full_attention": _DEFAULT_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}},
    "step3p5_vision": _SMALL_VISION,
    "radio": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "video_temporal_patch_size": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 2},
}  # fmt: skip
