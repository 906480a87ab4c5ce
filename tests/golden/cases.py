"""Cases of the golden tests: every family in several shapes, each at the tensor-parallel sizes it divides into.

Between them: a vocabulary that no size divides, heads wider than hidden / heads, one KV head, KV heads partitioned and
replicated, many files, float16 and bfloat16 files, tied and untied heads, every bias, every RoPE type, every window
pattern, both softcaps.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.golden.tiny_models import LATENT, MIXTURES

PROMPT, TOTAL = 31, 36  # tokens fed as a prompt, and with those that follow one by one

_ROPE_LONG = {"original_max_position_embeddings": 32, "factor": 4.0}
_SPREAD = [1.0, 1.1, 1.3, 1.7, 2.2, 2.9, 3.7, 4.6]


# Names that checkpoints of LLaVA's kind have since transformers 5, which writes the older ones.
_NEWER = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
          "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."}  # fmt: skip


def _longrope(pairs: int, original: int, share: float = 1.0) -> dict[str, Any]:
    table = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": _SPREAD[:pairs],
        "long_factor": [3 * factor for factor in _SPREAD[:pairs]], "partial_rotary_factor": share,
    }  # fmt: skip
    return {"original_max_position_embeddings": original, "rope_parameters": table}


@dataclass(frozen=True)
class Case:
    """A tiny model. `special` are fields of the family's transformers config."""

    family: str
    special: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2)
    files: torch.dtype = torch.float32
    max_shard_size: str = "50GB"
    max_model_len: int | None = None  # as served; None: the model's default
    claims: dict[str, Any] = field(default_factory=dict)  # written into config.json afterwards, true or not
    renamed: dict[str, str] = field(default_factory=dict)  # prefixes of stored names, and those written instead
    flat: bool = False  # the settings of a multimodal model's text part are written next to its own
    inputs_first: bool = False  # the tensors of all experts are written as [experts, inputs, outputs]


CASES: dict[str, Case] = {
    "cohere": Case("cohere", {"vocab_size": 307}, (1, 4)),
    "cohere2": Case("cohere2", {}, (1, 2, 4, 8)),  # its layer without window is not rotated
    "cohere2-untied-biased-one-kv-head": Case("cohere2", {"attention_bias": True, "tie_word_embeddings": False,
                                                          "num_key_value_heads": 1}, (2, 4), torch.float16),
    "qwen2": Case("qwen2", {}, (1, 2, 4, 8)),  # 8 ranks over 4 KV heads: replication
    "qwen2-tied-odd-vocab": Case("qwen2", {"tie_word_embeddings": True, "vocab_size": 303}, (1, 4)),
    "qwen2-one-kv-head": Case("qwen2", {"num_key_value_heads": 1}, (2, 4)),
    "qwen2-wrongly-called-tied": Case("qwen2", {}, (1, 2), claims={"tie_word_embeddings": True}),
    "qwen2-wide": Case("qwen2", {"hidden_size": 320, "intermediate_size": 640, "num_attention_heads": 10,
                                 "num_key_value_heads": 2}),  # rows longer than one float32 block
    "qwen2-window-pattern": Case("qwen2", {"use_sliding_window": True, "sliding_window": 12,
                                           "max_window_layers": 1}, (1,)),
    "qwen2-bf16-files": Case("qwen2", {}, (2,), torch.bfloat16),
    "qwen3": Case("qwen3", {}, (1, 2, 8)),
    "qwen3-biased-tied": Case("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "vocab_size": 301},
                              (4,)),
    "llama": Case("llama", {"vocab_size": 317}, (1, 4), max_shard_size="60KB"),
    "llama-multi-head": Case("llama", {"num_key_value_heads": 8}, (2, 8)),
    "llama-all-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu-fp16-files": Case("llama", {"hidden_act": "gelu_pytorch_tanh"}, (1,), torch.float16),
    "llama-linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}},
                         (1,)),
    "llama-llama3": Case("llama", {"head_dim": 32, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE_LONG}},
        (2,)),
    "llama-dynamic": Case("llama", {"max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, (1,)),
    "qwen2-yarn": Case("qwen2", {"hidden_size": 128, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, **_ROPE_LONG}}, (2,)),
    "qwen3-yarn-mscale": Case("qwen3", {"head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 24,
        "truncate": False, **_ROPE_LONG}}, (1,)),
    "mistral-window": Case("mistral", {}, (1, 2, 8)),  # the prompt is longer than its window of 24
    "mistral-no-window": Case("mistral", {"sliding_window": None}, (4,), torch.bfloat16),
    "gemma2": Case("gemma2", {}, (1, 2, 4, 8)),
    "gemma2-untied-biased-odd-vocab": Case("gemma2", {"tie_word_embeddings": False, "attention_bias": True,
                                                      "vocab_size": 309, "num_key_value_heads": 2}, (2,)),
    "gemma2-no-softcaps": Case("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None,
                                          "layer_types": ["full_attention"] * 3}, (1,), torch.bfloat16),
    "gemma3": Case("gemma3_text", {}, (1, 2, 8)),
    "gemma3-one-kv-head-scaled": Case("gemma3_text", {
        "num_key_value_heads": 1, "vocab_size": 311, "final_logit_softcapping": 2.0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, (1, 4), max_shard_size="60KB"),
    "olmo2": Case("olmo2", {}, (1, 2, 4, 8)),  # rows of q and k are normed over all ranks
    "olmo2-one-kv-head-biased": Case("olmo2", {"num_key_value_heads": 1, "attention_bias": True, "vocab_size": 313,
                                               "tie_word_embeddings": True}, (2, 4), torch.bfloat16),
    "phi3": Case("phi3", {"sliding_window": 20}, (1, 2, 4, 8)),
    "phi3-one-kv-head": Case("phi3", {"num_key_value_heads": 1, "vocab_size": 305}, (2,), torch.float16),
    "phi3-longrope-short": Case("phi3", _longrope(4, 64), (1,)),  # every sequence within the trained length
    "phi3-longrope-long": Case("phi3", _longrope(4, 16), (2,), max_model_len=512),  # every one beyond it
    "phi4": Case("phi3", {"hidden_size": 128, "tie_word_embeddings": True, "vocab_size": 307,
                          "num_key_value_heads": 2, **_longrope(6, 16, share=0.75)}, (1, 2, 4),
                 max_shard_size="120KB", max_model_len=512),
    "arcee": Case("arcee", {}, (1, 2, 4)),
    "arcee-gelu-biased-tied": Case("arcee", {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": True,
                                             "mlp_bias": False, "vocab_size": 303}, (2,), torch.bfloat16),
    "nemotron": Case("nemotron", {}, (1, 2, 4)),
    "nemotron-relu-biased": Case("nemotron", {"hidden_act": "relu", "attention_bias": True, "mlp_bias": True,
                                              "partial_rotary_factor": 0.25, "num_key_value_heads": 1}, (4,)),
    "jais2": Case("jais2", {}, (1, 2, 4)),
    "starcoder2": Case("starcoder2", {}, (1, 2, 4)),
    "starcoder2-unbiased-untied": Case("starcoder2", {"use_bias": False, "tie_word_embeddings": False,
                                                      "sliding_window": None, "vocab_size": 311}, (2,), torch.float16),
    "olmo": Case("olmo", {}, (1, 2, 4)),
    "olmo-unclipped-biased-tied": Case("olmo", {"clip_qkv": None, "attention_bias": True,
                                                "tie_word_embeddings": True}, (2,)),
    "cohere-compass": Case("cohere_compass_text", {}, (1, 2, 4)),
    "cwm": Case("cwm", {"mlp_bias": True}, (1, 2, 4)),
    "emu3": Case("emu3", {}, (1, 2, 4)),
    "ernie4-5": Case("ernie4_5", {}, (1, 2, 4)),
    "ernie4-5-biased-untied": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}, (2,)),
    "exaone4": Case("exaone4", {}, (1, 2, 4)),
    "exaone4-no-windows": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, (2,)),
    "gemma": Case("gemma", {}, (1, 2, 4)),
    "gemma-one-kv-head": Case("gemma", {"num_key_value_heads": 1, "hidden_act": "gelu"}, (4,), torch.bfloat16),
    "glm": Case("glm", {}, (1, 2, 4)),
    "glm4": Case("glm4", {}, (1, 2, 4)),
    "granite": Case("granite", {}, (1, 2, 4)),
    "granite-biased-tied": Case("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
                                (2,)),
    "granite-swa": Case("granite_swa", {}, (1, 2, 4)),
    "helium": Case("helium", {"attention_bias": True}, (1, 2, 4)),
    "hyperclovax": Case("hyperclovax", {}, (1, 2, 4)),
    "hyperclovax-no-post-norm": Case("hyperclovax", {"use_post_norm": False, "attention_multiplier": None}, (2,)),
    "internlm3": Case("internlm3", {}, (1, 2, 4), claims={"architectures": ["InternLM3ForCausalLM"]}),
    "ministral": Case("ministral", {}, (1, 2, 4)),
    "olmo3": Case("olmo3", {}, (1, 2, 4)),
    "phi4-multimodal": Case("phi4_multimodal", {
        "hidden_size": 128, "tie_word_embeddings": True, **_longrope(6, 16, share=0.75)}, (1, 2, 4),
        max_model_len=512),
    "seed-oss": Case("seed_oss", {"attention_out_bias": True}, (1, 2, 4)),
    "smollm3": Case("smollm3", {}, (1, 2, 4)),
    "smollm3-windows": Case("smollm3", {"use_sliding_window": True, "sliding_window": 12}, (2,)),
    "stablelm": Case("stablelm", {}, (1, 2, 4)),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}, (2,)),
    "vaultgemma": Case("vaultgemma", {}, (1, 2, 4)),
    "mixtral": Case("mixtral", {}, (1, 2, 4)),
    "qwen3-moe": Case("qwen3_moe", {}, (1, 2, 4, 8)),
    "qwen3-moe-dense-layers": Case("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}, (2,)),
    "olmoe": Case("olmoe", {}, (1, 2, 4)),
    "granite-moe": Case("granitemoe", {}, (1, 2, 4)),
    "granite-moe-shared": Case("granitemoeshared", {"tie_word_embeddings": True}, (1, 2, 4)),
    "qwen2-moe": Case("qwen2_moe", {}, (1, 2, 4)),
    "glm4-moe": Case("glm4_moe", {}, (1, 2, 4)),
    "ernie-moe": Case("ernie4_5_moe", {}, (1, 2, 4)),
    "gpt-oss": Case("gpt_oss", {}, (1, 2, 4)),
    "dots1": Case("dots1", {"attention_bias": True}, (1, 2, 4)),
    "exaone-moe": Case("exaone_moe", {}, (1, 2, 4)),
    "solar-open": Case("solar_open", {"attention_bias": True}, (1, 2, 4)),
    "flex-olmo": Case("flex_olmo", {}, (1, 2, 4)),
    "hy-v3": Case("hy_v3", {}, (1, 2, 4)),
    "minimax-m2": Case("minimax_m2", {}, (1, 2, 4)),
    "mellum": Case("mellum", {}, (1, 2, 4)),
    "flint": Case("flint", {}, (1, 2, 4)),
    "kolibri1": Case("kolibri1", {}, (1, 2, 4)),
    "phimoe": Case("phimoe", {}, (1, 2, 4)),
    "phimoe-longrope": Case("phimoe", {"sliding_window": None, "lm_head_bias": False, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": _SPREAD[:4], "long_factor": _SPREAD[4:],
        "short_mscale": 1.3, "long_mscale": 1.3, "original_max_position_embeddings": 64}}, (1,)),
    "granite-moe-swa": Case("granitemoe_swa", {}, (1, 2, 4)),
    "cohere2-moe": Case("cohere2_moe", {}, (1, 2, 4)),
    "cohere2-moe-rms-sigmoid": Case("cohere2_moe", {"rms_norm_eps": 1e-6, "expert_selection_fn": "sigmoid",
                                                    "shared_expert_combination_strategy": "sum"}, (1, 2)),
    "lfm2": Case("lfm2", {}, (1, 2, 4)),
    "lfm2-biased-untied-wide-kernel": Case("lfm2", {"conv_bias": True, "tie_word_embeddings": False, "conv_L_cache": 5,
                                                    "block_auto_adjust_ff_dim": False}, (2,), torch.bfloat16),
    "lfm2-moe": Case("lfm2_moe", {}, (1, 2, 4)),
    "lfm3": Case("lfm3", {}, (1, 2, 4)),
    "lfm3-ungated-biased": Case("lfm3", {"use_attention_gate": False, "use_sandwich_norm": False,
                                         "attention_bias": True}, (2,)),
    "gemma4": Case("gemma4_text", {}, (1, 2, 4)),
    "gemma4-without-inputs": Case("gemma4_text", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                                                  "attention_bias": True}, (2,)),
    "gemma4-experts": Case("gemma4_text", {
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 7,
        "top_k_experts": 3, "moe_intermediate_size": 36, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
        (1, 2, 4)),
    "gemma4-unified": Case("gemma4_unified_text", {}, (1, 2, 4)),
    "laguna": Case("laguna", {}, (1, 2, 4)),
    "laguna-gated-values": Case("laguna", {"gating": "per-element", "attention_bias": True}, (2,)),
    "mimo-v2-flash": Case("mimo_v2_flash", {}, (1, 2, 4)),
    "bamba": Case("bamba", {}, (1, 2, 4)),
    "bamba-one-group-biased-tied": Case("bamba", {"mamba_n_groups": 1, "mamba_proj_bias": True, "mlp_bias": True,
                                                  "mamba_conv_bias": False, "attention_bias": True,
                                                  "tie_word_embeddings": True}, (2,)),
    "falcon-h1": Case("falcon_h1", {}, (1, 2, 4)),
    "falcon-h1-normed": Case("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}, (1, 2)),
    "granite-hybrid": Case("granitemoehybrid", {}, (1, 2, 4)),
    "granite-hybrid-dense-rotated": Case("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope",
                                                              "tie_word_embeddings": True}, (1, 2)),
    "mamba2": Case("mamba2", {}, (1, 2, 4)),
    "mamba2-one-group-biased-tied": Case("mamba2", {"n_groups": 1, "use_bias": True, "use_conv_bias": False,
                                                    "tie_word_embeddings": True}, (2,)),
    "nemotron-h": Case("nemotron_h", {}, (1, 2, 4)),
    "nemotron-h-dense-eight-groups": Case("nemotron_h", {"n_groups": 8, "layers_block_type": [
        "linear_attention", "mlp", "full_attention", "linear_attention"], "use_bias": True, "mlp_bias": True}, (2, 8)),
    "gpt2": Case("gpt2", {}, (1, 2, 4, 8)),
    "gpt2-untied-scaled-by-layer": Case("gpt2", {"tie_word_embeddings": False, "vocab_size": 311, "scale_attn_weights":
                                                 False, "scale_attn_by_inverse_layer_idx": True,
                                                 "activation_function": "relu"}, (2,), torch.bfloat16),
    "starcoder": Case("gpt_bigcode", {}, (1, 2, 4)),  # all query heads share one key-value head
    "starcoder-multi-head": Case("gpt_bigcode", {"multi_query": False, "activation_function": "gelu",
                                                 "vocab_size": 309}, (1, 4), max_shard_size="60KB"),
    "opt": Case("opt", {}, (1, 2, 4)),
    "opt-untied-unbiased-gelu": Case("opt", {"tie_word_embeddings": False, "enable_bias": False,
                                             "activation_function": "gelu", "vocab_size": 303,
                                             "layer_norm_elementwise_affine": False}, (2,), torch.float16),
    "biogpt": Case("biogpt", {}, (1, 2, 4)),  # its embedding is scaled before a position is added
    "phi": Case("phi", {}, (1, 2, 4)),
    "phi-tied-odd-vocab": Case("phi", {"tie_word_embeddings": True, "vocab_size": 313, "num_key_value_heads": 1,
                                       "hidden_size": 128, "partial_rotary_factor": 0.25}, (2,)),
    "gpt-neo": Case("gpt_neo", {}, (1, 2, 4, 8)),
    "gpt-neo-untied-gelu": Case("gpt_neo", {"tie_word_embeddings": False, "vocab_size": 311,
                                            "activation_function": "gelu"}, (2,), torch.bfloat16),
    "gptj": Case("gptj", {}, (1, 2, 4, 8)),
    "gptj-tied-wide-heads": Case("gptj", {"tie_word_embeddings": True, "vocab_size": 311, "hidden_size": 128,
                                          "rotary_dim": 6}, (2,), torch.bfloat16),
    "pythia": Case("gpt_neox", {}, (1, 2, 4)),
    "gpt-neox-sequential": Case("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast",
                                             "attention_bias": False, "vocab_size": 307}, (2,), torch.float16),
    "ministral3": Case("ministral3", {}, (1, 2, 4)),
    "hunyuan-dense": Case("hunyuan_v1_dense", {}, (1, 2, 4)),
    "hunyuan-dense-dynamic-biased": Case("hunyuan_v1_dense", {"attention_bias": True, "max_position_embeddings": 32,
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        (2,)),
    "hunyuan-moe": Case("hunyuan_v1_moe", {}, (1, 2, 4)),
    "afmoe": Case("afmoe", {}, (1, 2, 4)),
    "qwen3-next": Case("qwen3_next", {}, (1, 2, 4)),
    "qwen3-5": Case("qwen3_5_text", {}, (1, 2, 4)),
    "qwen3-5-one-key-head-each-tied": Case("qwen3_5_text", {
        "linear_num_value_heads": 4, "tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 309,
        "linear_conv_kernel_dim": 3}, (4,), torch.bfloat16),
    "qwen3-5-moe": Case("qwen3_5_moe_text", {}, (1, 2, 4)),
    "olmo-hybrid": Case("olmo_hybrid", {}, (1, 2, 4)),
    "olmo-hybrid-unrotated": Case("olmo_hybrid", {"linear_allow_neg_eigval": False}, (2,),
                                  claims={"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
    "axk1": Case("axk1", {}, (1, 2, 4)),
    "deepseek-v2": Case("deepseek_v2", {}, (1, 2, 4)),
    "deepseek-v2-lite": Case("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
                             (2, 4)),
    "deepseek-v3": Case("deepseek_v3", {}, (1, 2, 4, 8)),
    "deepseek-v3-biased-halves": Case("deepseek_v3", {"rope_interleave": False, "attention_bias": True,
        "norm_topk_prob": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, (2,), torch.bfloat16),
    "deepseek-v32": Case("deepseek_v32", {"index_topk": TOTAL}, (1, 2, 4)),  # its indexer leaves no token out
    "glm4-moe-lite": Case("glm4_moe_lite", {}, (1, 2, 4)),
    "glm-moe-dsa": Case("glm_moe_dsa", {"index_topk": TOTAL}, (1, 2, 4)),
    "minicpm3": Case("minicpm3", {}, (1, 2, 4)),
    "minicpm3-plain-biased": Case("minicpm3", {"scale_depth": None, "dim_model_base": None, "attention_bias": True,
        "mlp_bias": True, "v_head_dim": 12, "q_lora_rank": None, "tie_word_embeddings": False}, (2,)),
    "minicpm3-longrope-long": Case("minicpm3", _longrope(4, 16), (2,), max_model_len=512),
    "youtu": Case("youtu", {}, (1, 2, 4)),
    "longcat-flash": Case("longcat_flash", {}, (1, 2, 4)),
    "longcat-flash-biased": Case("longcat_flash", {"attention_bias": True, "zero_expert_num": 0, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4}}, (2,), torch.bfloat16),
    "kimi-linear": Case("kimi_linear", {}, (1, 2, 4, 8)),
    "kimi-linear-query-latent-biased": Case("kimi_linear", {"q_lora_rank": 20, "attention_bias": True,
        "norm_topk_prob": False}, (2,), torch.bfloat16),
    "bailing-hybrid": Case("bailing_hybrid", {}, (1, 2, 4)),
    "bailing-hybrid-unbounded-mscale": Case("bailing_hybrid", {"kda_safe_gate": False, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.7}}, (2,)),
    "llama4": Case("llama4_text", {}, (1, 2, 4)),
    "llama4-plain": Case("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True,
        "num_experts_per_tok": 1, "moe_layers": [0, 2], "no_rope_layers": [1, 1, 1], "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 1.0, **_ROPE_LONG}},
        (2,)),
}  # fmt: skip
# One case per family and size, for tests that need not run on every shape.
FAMILY_CASES = (
    "qwen2", "qwen3", "llama", "mistral-window", "gemma2", "gemma3", "olmo2", "cohere", "cohere2", "phi3", "phi4",
    "gpt2", "starcoder", "opt", "phi", "pythia",
    "nemotron", "starcoder2", "olmo",
    "lfm2", "gemma4",
    # What the families above do not have together.
    "glm4", "granite-swa", "hyperclovax", "olmo3", "exaone4", "stablelm",
)  # fmt: skip
# Multimodal models, whose text part is served.
_WRAPPERS: dict[str, Case] = {
    "aya-vision-wrapper": Case("aya_vision", {}, (1, 2, 4)),
    "cohere-compass-wrapper": Case("cohere_compass", {}, (1, 2, 4)),
    "gemma3-wrapper": Case("gemma3", {}, (1, 2, 4)),
    "gemma3-wrapper-new-names": Case("gemma3", {}, (1, 2), renamed=_NEWER),
    "gemma4-wrapper": Case("gemma4", {}, (1, 2)),
    "gemma4-unified-wrapper": Case("gemma4_unified", {}, (1, 2)),
    "kimi-k25-wrapper": Case("kimi_k25", {}, (1, 2), renamed={
        "language_model.model.blocks.": "language_model.model.layers."}),
    "lfm2-vl-wrapper": Case("lfm2_vl", {}, (1, 2)),
    "lfm3-vl-wrapper": Case("lfm3_vl", {}, (1, 2)),
    "glm4v-wrapper": Case("glm4v", {}, (1, 2, 4)),
    "glm4v-moe-wrapper": Case("glm4v_moe", {}, (1, 2, 4)),
    "hunyuan-vl-wrapper": Case("hunyuan_vl", {}, (1, 2, 4)),
    "llama4-wrapper": Case("llama4", {}, (1, 2, 4)),
    "deepseek-vl-wrapper": Case("deepseek_vl", {}, (1, 2)),
    "idefics3-wrapper": Case("idefics3", {}, (1, 2)),
    "llava-wrapper": Case("llava", {}, (1, 2, 4)),
    "llava-wrapper-new-names-tied": Case("llava", {"text_config": {"tie_word_embeddings": True}}, (1, 2),
                                         renamed=_NEWER),
    "paddleocr-vl-wrapper": Case("paddleocr_vl", {}, (1, 2, 4)),
    "smolvlm-wrapper": Case("smolvlm", {}, (1, 2, 4)),
    "mistral3-wrapper-of-ministral3": Case("mistral3", {"like": "ministral3"}, (1, 2, 4)),
    "llava-next-wrapper": Case("llava_next", {}, (1, 2)),
    "mistral3-wrapper": Case("mistral3", {}, (1, 2, 4)),
    "got-ocr2-wrapper": Case("got_ocr2", {}, (1, 2)),
    "llava-onevision-wrapper": Case("llava_onevision", {}, (1, 2)),
    "ovis2-wrapper": Case("ovis2", {}, (1, 2)),
    "qwen2-vl-wrapper": Case("qwen2_vl", {}, (1, 2, 4)),
    "qwen2-vl-wrapper-flat": Case("qwen2_vl", {}, (1, 2), flat=True),
    "qwen2-vl-wrapper-new-names": Case("qwen2_vl", {}, (1, 2), renamed={
        "visual.": "model.visual.", "model.": "model.language_model."}),
    "qwen2-5-vl-wrapper": Case("qwen2_5_vl", {}, (1, 2, 4)),
    "internvl-wrapper": Case("internvl", {}, (1, 2, 4)),
    "qwen3-vl-wrapper": Case("qwen3_vl", {}, (1, 2, 4)),
    "qwen3-vl-moe-wrapper": Case("qwen3_vl_moe", {}, (1, 2, 4)),
    "qwen3-5-wrapper": Case("qwen3_5", {}, (1, 2, 4)),
    "qwen3-5-moe-wrapper": Case("qwen3_5_moe", {}, (1, 2, 4)),
    "qwen3-vl-moe-wrapper-as-published": Case("qwen3_vl_moe", {}, (1, 2, 4), inputs_first=True),
}  # fmt: skip
CASES |= _WRAPPERS
RUNS = [(name, size) for name, case in CASES.items() for size in case.sizes]
# Multimodal models compute as their text models do: of those, one for each kind of names.
_SHORT_WRAPPERS = ("gemma3-wrapper", "gemma3-wrapper-new-names", "qwen2-vl-wrapper-flat",
                   "qwen3-vl-moe-wrapper-as-published")  # fmt: skip
# Families with latent attention have it from one module: of those, one with and one without experts.
_SHORT_LATENT = ("deepseek-v3", "minicpm3")
# One size of each case, in turn the smallest, the next and so on: the others are for `make test-long`.
SHORT_RUNS = {
    (name, case.sizes[number % len(case.sizes)])
    for number, (name, case) in enumerate(CASES.items())
    if name in (*_SHORT_WRAPPERS, *_SHORT_LATENT) or (name not in _WRAPPERS and case.family not in LATENT)
}
# Cases whose every tensor is compared in `make test`: what is wrong in the others shows in the logits.
SHORT_LAYERS = {name for name, case in CASES.items() if name in FAMILY_CASES or case.family in MIXTURES}
SHORT_LAYERS |= {"olmo-hybrid", "qwen3-5"}


def run_id(name: str, size: int) -> str:
    return f"{name}-tp{size}"


def marks_of(name: str, size: int) -> list[pytest.MarkDecorator]:
    """The marks of a run. Multimodal models at all sizes compute as their text models do, which `product` covers."""
    if (name, size) in SHORT_RUNS:
        return []
    return [pytest.mark.every if name in _WRAPPERS else pytest.mark.product]
