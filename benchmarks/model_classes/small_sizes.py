"""Small sizes for any config class of transformers, by the names that its settings have.

Classes call the same size by many names; a setting that no table below knows keeps the default of its class.
"""

from typing import Any

LAYERS = 4
HEADS, KV_HEADS = 4, 2
VOCABULARY = 320
_UNCHANGED = object()

# Size -> the names of settings that get it, if the class has a number there.
_BY_SIZE: dict[int, str] = {
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd emb_dim embedding_size input_embedding_size word_embed_proj_dim lru_width"
    " attention_hidden_size embedding_dim ple_embed_dim rel_extent",
    96: "intermediate_size ffn_dim ffn_hidden_size d_inner n_inner encoder_ffn_dim decoder_ffn_dim feed_forward_size"
    " intermediate_size_mlp dense_intermediate_size dff",
    32: "shared_intermediate_size moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"
    " shared_experts_intermediate_size moe_shared_expert_intermediate_size mamba_d_head mamba_head_dim mamba_headdim",
    HEADS: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"
    " decoder_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads zero_expert_num"
    " swa_num_attention_heads",
    8: "num_experts n_routed_experts num_local_experts moe_num_experts qk_rope_head_dim rotary_dim mamba_dt_rank"
    " mamba_chunk_size time_step_rank chunk_size block_size hidden_size_per_layer_input laurel_rank d_rel"
    " attention_chunk_size make_ngram_vocab_size_divisible_by",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k index_n_heads linear_num_key_heads n_mamba_heads"
    " o_groups heads_per_ngram split_ngram_parts",
    16: "kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank index_head_dim mamba_d_state state_size ssm_state_size"
    " linear_key_head_dim linear_value_head_dim linear_head_dim attention_head_dim kv_channels swa_head_dim hc_lowrank",
    24: "q_lora_rank",
    128: "mamba_d_ssm ngram_vocab_size_base",
    512: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"
    " max_target_positions",
    # Windows are shorter than the prompts that are run.
    7: "sliding_window sliding_window_size attention_window_size window_size",
    10: "local_attention",
    1000: "index_topk",
    0: "bos_token_id boi_token_id eoi_token_id",
    1: "eos_token_id first_k_dense_replace num_dense_layers moe_layer_start_index",
    319: "image_token_id video_token_id audio_token_id image_token_index audio_token_index vision_start_token_id"
    " vision_end_token_id boi_token_index eoi_token_index sep_token_id cls_token_id eod_token_id mask_token_id"
    " unk_index mask_index",
}  # fmt: skip
_SIZE_OF = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
# With latent attention, `head_dim` is the width of the rotated part and follows from other settings.
_LATENT = "qk_rope_head_dim"


def small_settings(default: dict[str, Any]) -> dict[str, Any]:
    """Return small values for the settings `default` of a config class, without the settings of its parts."""
    layers = next((default[name] for name in _LAYERS if _is_number(default.get(name))), 0)
    lists = {name: value for name, value in default.items() if layers and _is_of_layers(value, layers)}
    kept = _kept_layers(lists, layers)
    small: dict[str, Any] = {name: len(kept) for name in _LAYERS if _is_number(default.get(name))}
    small |= {name: [value[layer] for layer in kept] for name, value in lists.items()}
    if "num_attention_heads_per_layer" in lists:
        small["num_attention_heads_per_layer"] = [HEADS] * len(kept)
    for name, value in default.items():
        size = _small_value(name, value, default)
        if size is not _UNCHANGED and name not in small:
            small[name] = size
    if "pad_token_id" in default:
        small["pad_token_id"] = None if default["pad_token_id"] is None else 2
    rope = default.get("rope_parameters")
    if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
        small["rope_parameters"] = {**rope, "original_max_position_embeddings": 64}
    return small


def _small_value(name: str, value: Any, default: dict[str, Any]) -> Any:
    if name in ("bos_token_id", "eos_token_id"):
        return _SIZE_OF[name]
    if not _is_number(value):
        return _UNCHANGED
    if name in _KV_HEADS:  # as many as heads, if the class has as many
        heads = default.get(name.replace("key_value", "attention").replace("kv", "attention"))
        return {1: 1, heads: HEADS}.get(value, KV_HEADS)
    if name == "head_dim":
        return _UNCHANGED if _LATENT in default else 16
    if name == "global_head_dim":
        return 32
    if name in ("n_group", "num_expert_group"):
        return min(value, 2)
    if name == "topk_group":
        return min(value, 1)
    if name == "moe_layer_end_index":
        return LAYERS - 1
    return _SIZE_OF.get(name, _UNCHANGED)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_layers(value: Any, layers: int) -> bool:
    """Return whether `value` has one entry for each layer."""
    return isinstance(value, list) and len(value) == layers and not isinstance(value[0], list | dict)


def _kept_layers(lists: dict[str, list[Any]], layers: int) -> list[int]:
    """Return the layers to keep: each combination of entries once, then the first of the others."""
    first: dict[tuple[str, ...], int] = {}
    for layer in range(layers if lists else 0):
        first.setdefault(tuple(str(value[layer]) for value in lists.values()), layer)
    kept = sorted(first.values())[:6]
    others = (layer for layer in range(max(layers, LAYERS)) if layer not in kept)
    while len(kept) < LAYERS:
        kept.append(next(others))
    return sorted(kept)
