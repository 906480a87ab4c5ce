"""Checkpoints for tests: tiny seeded models of every family, written by transformers itself.

from tests.golden.tiny_models import make_tiny

path = make_tiny(tmp_path, "qwen2", num_key_value_heads=1, tokenizer=True)
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

FAMILIES = ("arcee", "biogpt", "cohere", "cohere2", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox",
            "hunyuan_v1_dense", "jais2", "llama", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "opt", "phi",
            "phi3", "qwen2", "qwen3", "starcoder2")  # fmt: skip
MIXTURES = ("afmoe", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe",
            "llama4_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # fmt: skip
# Families that need only values: a description on their page, and no code of their own.
DESCRIBED = ("cohere_compass_text", "cwm", "emu3", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt_neo", "gptj",
             "granite", "granite_swa", "helium", "hyperclovax", "internlm3", "ministral", "olmo3", "phi4_multimodal",
             "seed_oss", "smollm3", "stablelm", "vaultgemma")  # fmt: skip
# Families whose layers have a recurrent state.
RECURRENT = ("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h",
             "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # fmt: skip
# Families with latent attention.
LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
          "longcat_flash", "minicpm3", "youtu")  # fmt: skip
# Small and odd on purpose: heads share KV heads, and no size is a power of two by accident of the family's defaults.
_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_MULTIPLIERS = {"attention_multiplier": 0.4, "embedding_multiplier": 6.0, "residual_multiplier": 0.6,
                "logits_scaling": 3.0}  # fmt: skip
_AROUND = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING = {"sliding_window": 12, "layer_types": _AROUND}
_SEVEN = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "head_dim": 24}
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 12,
          "linear_value_head_dim": 20,
          "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
_GROUPS = {"num_experts_per_tok": 3, "moe_intermediate_size": 36, "n_group": 4, "topk_group": 2,
           "routed_scaling_factor": 1.7}  # fmt: skip
_LATENT = {"num_key_value_heads": 8, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
           "qk_rope_head_dim": 8, "v_head_dim": 20}  # fmt: skip
_LATENT_GROUPS = {**_LATENT, **_GROUPS, "n_routed_experts": 8, "n_shared_experts": 2}
# YaRN that begins within the tests' prompts, and whose factor changes the scores.
_MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
           "mscale": 1.0, "mscale_all_dim": 0.7}  # fmt: skip
_KIMI = {**{key: size for key, size in _LATENT.items() if key != "q_lora_rank"}, **_GROUPS, "num_local_experts": 8,
         "n_shared_experts": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse"]}  # fmt: skip
_INDEXER = {"index_topk": 48, "index_head_dim": 16, "index_n_heads": 2}
_GEMMA4 = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 12,
           "head_dim": 16, "global_head_dim": 32}  # fmt: skip
# What sets a family apart. Windows are shorter than the tests' prompts, softcaps low enough to bend the scores.
_FAMILY: dict[str, dict[str, Any]] = {
    "arcee": {"mlp_bias": True},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 12, "logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention",
                                                                           "sliding_attention"]},
    "gemma2": {"sliding_window": 12, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 2.5},
    "gemma3_text": {"sliding_window": 12, "head_dim": 24, "query_pre_attn_scalar": 20, "layer_types":
                    ["sliding_attention", "full_attention", "sliding_attention"]},
    "jais2": {},
    "hunyuan_v1_dense": {"head_dim": 24, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}},
    "llama": {},
    # The query scale changes several times within the tests' prompts.
    "ministral3": {"head_dim": 24, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 7, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}},
    "mistral": {"sliding_window": 24, "head_dim": None},
    "nemotron": {"head_dim": 24},  # half of each head is rotated
    "olmo": {"clip_qkv": 0.5},  # which most queries, keys and values reach
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    # Some have their own names for sizes, and no key-value heads to choose.
    "biogpt": {"num_key_value_heads": None},
    "gpt2": {"n_inner": 96, "num_key_value_heads": None},
    "gpt_bigcode": {"n_inner": 96, "num_key_value_heads": None},
    "gpt_neo": {"intermediate_size": 96, "window_size": 12, "num_key_value_heads": None,
                "attention_types": [[["local", "global"], 1], [["local"], 1]]},
    "gptj": {"n_inner": 96, "rotary_dim": 4, "num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": None, "rotary_pct": 0.5},
    "opt": {"ffn_dim": 96, "num_key_value_heads": None},
    "phi": {},
    "starcoder2": {"sliding_window": 12},
    "cohere_compass_text": {"sliding_window": 12, "logit_scale": 0.25, "layer_types": _AROUND, "rope_parameters": {
        "full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 5e4,
                                                      "mrope_section": [2, 1, 1]}}},
    "cwm": {"sliding_window": 12, "head_dim": 24, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}},
    "emu3": {"pad_token_id": 2},
    "ernie4_5": {"head_dim": 24},
    "exaone4": {"sliding_window": 12, "layer_types": _AROUND},
    "gemma": {"head_dim": 24},
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 24},
    "granite": _MULTIPLIERS,
    "granite_swa": {**_MULTIPLIERS, "sliding_window": 12, "layer_rope_theta": [5e5, 0, 1e4]},
    "helium": {"head_dim": 8},
    "hyperclovax": {**_MULTIPLIERS, "head_dim": 24},
    "internlm3": {"head_dim": 24, "max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e5, "factor": 6.0}},
    "ministral": {"sliding_window": 12, "head_dim": 24, "layer_types": _AROUND},
    "olmo3": {"sliding_window": 12, "layer_types": _AROUND, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                           "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "crop_size": 28, "image_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
                         "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8}},
    "seed_oss": {"head_dim": 24},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "vaultgemma": {"sliding_window": 12, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
                   "final_logit_softcapping": 2.5},
    # Widths that 8 ranks cannot cut into equal slices.
    "afmoe": {"moe_intermediate_size": 36, "num_experts": 7, "num_experts_per_tok": 3, "num_shared_experts": 2,
              "num_dense_layers": 1, "head_dim": 24, "sliding_window": 12, "route_scale": 1.7, "mup_enabled": True,
              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "hunyuan_v1_moe": {"intermediate_size": 36, "num_experts": 6, "moe_topk": 3, "head_dim": 24},
    # Chunks that neither blocks nor the cuts of the tests' prompts fit, and two experts of a token.
    "llama4_text": {"intermediate_size": 36, "intermediate_size_mlp": 52, "num_local_experts": 5,
                    "num_experts_per_tok": 2, "head_dim": 24, "interleave_moe_layer_step": 2,
                    "attention_chunk_size": 11, "no_rope_layer_interval": 3, "floor_scale": 5, "attn_scale": 0.4},
    "ernie4_5_moe": {"moe_intermediate_size": 36, "moe_num_experts": 6, "moe_k": 3},
    "glm4_moe": {"moe_intermediate_size": 36, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                 "topk_group": 2, "routed_scaling_factor": 1.7, "head_dim": 24, "use_qk_norm": True},
    # A limit that activations reach, and YaRN that begins within the tests' prompts.
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 36, "head_dim": 24,
                "sliding_window": 12, "swiglu_limit": 0.8, "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                    "original_max_position_embeddings": 16}},
    "granitemoe": {"num_local_experts": 5, **_MULTIPLIERS},
    "granitemoeshared": {"num_local_experts": 5, "shared_intermediate_size": 52, **_MULTIPLIERS},
    "granitemoe_swa": {"num_local_experts": 5, "shared_intermediate_size": 52, **_MULTIPLIERS, **_SLIDING,
                       "layer_rope_theta": [1e4, 0, 5e3]},
    "mixtral": {"num_local_experts": 5, "intermediate_size": 72},
    "olmoe": {"num_experts": 9, "num_experts_per_tok": 4},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 36,
                  "shared_expert_intermediate_size": 52, "decoder_sparse_step": 2},
    "qwen3_moe": {**_SEVEN, "norm_topk_prob": True},
    "dots1": {**_GROUPS, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
              "norm_topk_prob": True, "sliding_window": 12, "max_window_layers": 2},
    "exaone_moe": {**_GROUPS, **_SLIDING, "num_experts": 8, "num_shared_experts": 2},
    "solar_open": {**_GROUPS, "n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 24},
    "flex_olmo": {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 72},
    "hy_v3": {**_SEVEN, "num_shared_experts": 2, "router_scaling_factor": 1.7},
    "minimax_m2": {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 36, "head_dim": 24,
                   "rotary_dim": 12},
    # Rotation that YaRN changes within the tests' prompts, in one layer.
    "mellum": {**_SEVEN, **_SLIDING, "mlp_layer_types": ["sparse", "sparse", "dense"], "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                           "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "flint": {**_SEVEN, **_SLIDING, "shared_expert_intermediate_size": 52, "mlp_only_layers": [0]},
    "kolibri1": {**_SEVEN, **_SLIDING, "shared_expert_intermediate_size": 52},
    # A tolerance that is wide enough for other experts to take a share of a weight.
    "phimoe": {"num_local_experts": 7, "num_experts_per_tok": 2, "intermediate_size": 36, "router_jitter_noise": 0.3,
               "attention_bias": True, "lm_head_bias": True, "sliding_window": 24},
    # A dense layer that is rotated without a window, and one with experts that is not.
    # Time steps that reach both limits, and chunks that the tests' prompts do not fit.
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "time_step_limit": [0.3, 1.4], "mamba_n_groups": 2},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96, "mamba_n_groups": 2, "mamba_d_state": 12, "embedding_multiplier": 3.0,
                  "lm_head_multiplier": 0.4, "key_multiplier": 0.7, "attention_in_multiplier": 1.2,
                  "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8,
                  "ssm_multipliers": [0.7, 1.3, 0.6, 1.7, 0.8], "mlp_multipliers": [0.6, 1.4]},
    "granitemoehybrid": {**_MAMBA, **_MULTIPLIERS, "num_local_experts": 5, "shared_intermediate_size": 52,
                         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8, "vocab_size": 320,
               "hidden_size": 64, "num_hidden_layers": 3, "time_step_limit": [0.3, 1.4],
               **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads",
                                "max_position_embeddings"))},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 24,
                   "mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
                   "time_step_min": 0.4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 36,
                   "moe_shared_expert_intermediate_size": 52, "n_group": 4, "topk_group": 2,
                   "routed_scaling_factor": 1.7, "num_hidden_layers": None},
    # Equal sizes of keys and values: transformers saves its convolution in three equal parts.
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 4, "linear_key_head_dim": 20},
    "qwen3_next": {**_DELTA, **_SEVEN, "shared_expert_intermediate_size": 52, "mlp_only_layers": [0]},
    "qwen3_5_text": {**_DELTA, "head_dim": 24, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1], "mrope_interleaved": True}},
    "qwen3_5_moe_text": {**_DELTA, **_SEVEN, "shared_expert_intermediate_size": 52},
    "cohere2_moe": {"num_experts": 5, "num_experts_per_tok": 3, "num_shared_experts": 2, "intermediate_size": 36,
                    "prefix_dense_intermediate_size": 52, "head_dim": 24, "logit_scale": 0.25, "sliding_window": 12,
                    "mlp_layer_types": ["dense", "sparse", "sparse"],
                    "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    # Convolutions around attention, whose states outlive the chunks of the tests' prompts.
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16,
             "block_ffn_dim_multiplier": 1.3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 5,
                 "num_experts_per_tok": 3, "moe_intermediate_size": 36, "routed_scaling_factor": 1.7},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 12, "head_dim": 24},
    # The last two layers read the keys and values of the first two.
    "gemma4_text": {**_GEMMA4, "vocab_size_per_layer_input": 330, "hidden_size_per_layer_input": 16,
                    "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4_unified_text": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
                            "final_logit_softcapping": 2.5},
    "axk1": {**_LATENT_GROUPS, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": _MSCALE},
    "deepseek_v2": {**_LATENT_GROUPS, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
                    "rope_parameters": _MSCALE},
    "deepseek_v3": {**_LATENT_GROUPS, "first_k_dense_replace": 1, "rope_parameters": _MSCALE},
    "deepseek_v32": {**_LATENT_GROUPS, **_INDEXER, "first_k_dense_replace": 1, "rope_parameters": _MSCALE},
    "glm4_moe_lite": {**_LATENT_GROUPS, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {**_LATENT_GROUPS, **_INDEXER, "mlp_layer_types": ["dense", "sparse", "sparse"],
                    "indexer_types": ["full", "shared", "full"]},
    "minicpm3": {**_LATENT, "v_head_dim": None, "scale_emb": 3, "dim_model_base": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [3.0, 3.3, 3.9, 5.1], "original_max_position_embeddings": 64}},
    "youtu": _LATENT,
    # Layers of transformers that are two of ours, and experts without matrices among the others.
    "longcat_flash": {**_LATENT, "head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96,
                      "expert_ffn_hidden_size": 36, "moe_topk": 4, "n_routed_experts": 7, "zero_expert_num": 5,
                      "routed_scaling_factor": 1.7, "rope_parameters": _MSCALE},
    # Kimi delta attention around latent attention, in heads of another number and width.
    "kimi_linear": {**_KIMI, "linear_num_heads": 16, "linear_head_dim": 12, "linear_conv_kernel_dim": 3},
    "bailing_hybrid": {**_KIMI, "head_dim": 12, "kda_lower_bound": -2.5, "num_mtp_layers": 0, "layer_group_size": 3},
    "laguna": {**_SEVEN, **_SLIDING, "shared_expert_intermediate_size": 52, "moe_routed_scaling_factor": 1.7,
               "num_attention_heads_per_layer": [8, 16, 4]},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2, "n_routed_experts": 8,
                      "num_experts_per_tok": 3, "moe_intermediate_size": 36, "routed_scaling_factor": 1.7,
                      **_SLIDING},
}  # fmt: skip

_NORM = re.compile(r"(norm(_?\d)?|ln_[12f])\.weight$")


def make_tiny(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write `folder/<family>-<n>` with config.json and safetensors (in shards if they exceed `max_shard_size`).

    `overrides` are fields of the family's transformers config. Biases and norms are random too: at their initial
    values a lost one would not show. With `tokenizer`, a byte-level one whose ids all decode is written beside it.
    """
    path = folder / f"{family}-{len(list(folder.glob(f'{family}-*')))}"
    model = tiny_model(family, seed=seed, **overrides)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        write_byte_tokenizer(path, model.config.get_text_config().vocab_size)
    return path


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The model itself, float32, in evaluation mode."""
    from tests.golden.tiny_wrappers import WRAPPERS, wrapper_settings

    if family in WRAPPERS:
        like = overrides.get("like", WRAPPERS[family]["like"])
        class_, settings = wrapper_settings(family, {**_SHAPE, **_FAMILY[like]}, **overrides)
        return _random_model(AutoConfig.for_model(family, **settings), seed, std=0.08, make=class_._from_config)
    return _random_model(tiny_config(family, **overrides), seed, std=0.08)


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The settings of a tiny model."""
    fields = {**_SHAPE, **_FAMILY[family], **overrides}
    if family == "emu3":  # whose own settings are those of its text model
        fields = {"text_config": fields}
    return AutoConfig.for_model(family, **fields)


def _random_model(
    config: Any, seed: int, std: float, make: Callable[..., Any] = AutoModelForCausalLM.from_config
) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.normal_(std=0.1 if name.endswith("bias") else 1.0)
                elif name.endswith("A_log"):  # states that last for a few tokens, and for many
                    parameter.normal_(mean=-1.5, std=1.0)
                elif _NORM.search(name):
                    has_offset = re.search(r"gemma(?!4)|nemotron$|qwen3_(next|5)", config.model_type) is not None
                    has_offset = has_offset and "linear_attn" not in name
                    parameter.normal_(mean=0.0 if has_offset else 1.0, std=0.1)
                elif name.endswith(("router.scale", "per_expert_scale")):
                    parameter.normal_(mean=1.0, std=0.2)
                elif name.endswith("conv.weight"):
                    parameter.normal_(std=0.5)
                elif std > 0:
                    parameter.normal_(std=std)
            for name, buffer in model.named_buffers():
                if name.endswith("bias") and buffer.is_floating_point():  # others are masks
                    buffer.normal_(std=0.1)
                elif name.endswith("layer_scalar"):
                    buffer.uniform_(0.6, 1.4)
    return model.eval()


def write_byte_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level: the two special tokens, the 256 bytes, then invented words up to `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 258:
        raise ValueError(f"a byte-level tokenizer needs 258 ids, the model has {vocab_size}")
    special = ["<|begin|>", "<|end|>"]
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"w{index}" for index in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1]).save_pretrained(
        path
    )
