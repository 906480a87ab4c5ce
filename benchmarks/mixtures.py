"""Shapes of mixtures of experts as published, and checkpoints of these shapes with seeded random weights.

Tensors have the names of the published files, and are written layer by layer: the largest model has more
bytes than the memory of a machine that serves its rounded weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Granite 3.1 1B-A400M (1.3 billion parameters, 0.4 of them at work for a token), OLMoE 1B-7B (6.9 and 1.3 billion) and
# DeepSeek-V2-Lite (15.7 and 2.7 billion), which has latent attention. `deepseek-v2-lite-32-experts` has
# half as many experts, and fits 24 GiB of memory twice at 8 bits: a token alone costs the same. (Fewer layers would fit
# as well, but llama.cpp knows the Lite models by the number of their layers.) `quick-mixture` is Granite's
# architecture in a second, for trying the programs themselves; `small-mixture` has experts of Granite's size in OLMoE's
# architecture, whose files have a tensor for each expert, as adapters need.
_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "model_type": "granitemoe",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 512,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "vocab_size": 49_155,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_500_000.0,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "tie_word_embeddings": True,
}
_OLMOE: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50_304,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "vocab_size": 102_400,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "granite-1b-a400m": _GRANITE,
    "deepseek-v2-lite": _DEEPSEEK,
    "deepseek-v2-lite-32-experts": _DEEPSEEK | {"n_routed_experts": 32},
    "olmoe-1b-7b": _OLMOE,
    "small-mixture": _OLMOE
    | {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 512,
        "num_experts": 32,
        "vocab_size": 32_768,
    },
    "quick-mixture": _GRANITE
    | {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
    },
}
Named = tuple[str, tuple[int, ...]]


def experts(s: dict[str, Any]) -> int:
    """Number of routed experts of a layer."""
    return s.get("num_local_experts") or s.get("n_routed_experts") or s["num_experts"]


def _layer(s: dict[str, Any], number: int) -> Iterator[Named]:
    """Names and shapes of one layer's tensors."""
    if s["model_type"] == "deepseek_v2":
        yield from _latent_layer(s, f"model.layers.{number}", is_dense=number < s["first_k_dense_replace"])
        return
    hidden, width, count = s["hidden_size"], s["intermediate_size"], experts(s)
    kv = hidden // s["num_attention_heads"] * s["num_key_value_heads"]
    layer = f"model.layers.{number}"
    for name, outputs in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden)):
        yield f"{layer}.self_attn.{name}.weight", (outputs, hidden)
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    if s["model_type"] == "granitemoe":
        yield f"{layer}.block_sparse_moe.router.layer.weight", (count, hidden)
        yield f"{layer}.block_sparse_moe.input_linear.weight", (count, 2 * width, hidden)
        yield f"{layer}.block_sparse_moe.output_linear.weight", (count, hidden, width)
        return
    yield f"{layer}.self_attn.q_norm.weight", (hidden,)
    yield f"{layer}.self_attn.k_norm.weight", (kv,)
    yield f"{layer}.mlp.gate.weight", (count, hidden)
    for expert in range(count):
        for name in ("gate_proj", "up_proj", "down_proj"):
            size = (hidden, width) if name == "down_proj" else (width, hidden)
            yield f"{layer}.mlp.experts.{expert}.{name}.weight", size


def _latent_layer(s: dict[str, Any], layer: str, *, is_dense: bool) -> Iterator[Named]:
    """Names and shapes of the tensors of a layer of DeepSeek-V2. `is_dense`: it has an MLP instead of experts."""
    hidden, heads, rank = s["hidden_size"], s["num_attention_heads"], s["kv_lora_rank"]
    nope, rope, value = s["qk_nope_head_dim"], s["qk_rope_head_dim"], s["v_head_dim"]
    attention = f"{layer}.self_attn"
    yield f"{attention}.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{attention}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{attention}.kv_a_layernorm.weight", (rank,)
    yield f"{attention}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{attention}.o_proj.weight", (hidden, heads * value)
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    width = s["moe_intermediate_size"]
    mlps = {"mlp": s["intermediate_size"]}
    if not is_dense:
        yield f"{layer}.mlp.gate.weight", (experts(s), hidden)
        mlps = {f"mlp.experts.{expert}": width for expert in range(experts(s))}
        mlps["mlp.shared_experts"] = s["n_shared_experts"] * width
    for name, inner in mlps.items():
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            size = (hidden, inner) if matrix == "down_proj" else (inner, hidden)
            yield f"{layer}.{name}.{matrix}.weight", size


def _around(s: dict[str, Any]) -> Iterator[Named]:
    """Names and shapes of the tensors outside layers."""
    yield "model.embed_tokens.weight", (s["vocab_size"], s["hidden_size"])
    yield "model.norm.weight", (s["hidden_size"],)
    if not s["tie_word_embeddings"]:
        yield "lm_head.weight", (s["vocab_size"], s["hidden_size"])


def tensors(shape: str) -> Iterator[list[Named]]:
    """Names and shapes of all tensors, in lists of which each is a file."""
    s = MIXTURES[shape]
    for number in range(s["num_hidden_layers"]):
        yield list(_layer(s, number))
    yield list(_around(s))


def active_parameters(shape: str) -> tuple[int, int]:
    """Number of parameters that are read for one token, with the output head and without it."""
    s = MIXTURES[shape]
    layers = s["num_hidden_layers"]
    stored = sum(math.prod(size) for number in range(layers) for _, size in _layer(s, number))
    width = s.get("moe_intermediate_size", s["intermediate_size"])
    idle = (layers - s.get("first_k_dense_replace", 0)) * (experts(s) - s["num_experts_per_tok"])
    inner = stored - 3 * idle * width * s["hidden_size"] + s["hidden_size"]
    return inner + s["vocab_size"] * s["hidden_size"], inner


def write(shape: str, out: Path, seed: int) -> None:
    """Write the configuration and the tensors in bfloat16: norms around one, all others of deviation 0.02."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    config = MIXTURES[shape] | {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    draw = torch.Generator().manual_seed(seed)
    of_file: dict[str, str] = {}
    total = 0
    for number, named in enumerate(tensors(shape)):
        file = f"model-{number:05}.safetensors"
        stored = {}
        for name, size in named:
            values = torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02, generator=draw)
            stored[name] = values.add_(1) if len(size) == 1 else values
            total += values.nbytes
        save_file(stored, out / file, metadata={"format": "pt"})
        of_file |= dict.fromkeys(stored, file)
    index = {"metadata": {"total_size": total}, "weight_map": of_file}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
