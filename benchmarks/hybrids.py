"""The shape of a hybrid model with seeded random weights, and a Qwen3 of as many bytes to compare it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Qwen3.5-0.8B's text part as published: of four layers three are gated delta nets. The Qwen3 has the same vocabulary,
# width and number of layers; its MLP is so wide that the layers of both have about 496 million parameters.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
        "max_position_embeddings": 32_768,
    },
    "qwen3-0.8b": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 4672,
        "vocab_size": 248_320,
        "max_position_embeddings": 32_768,
    },
}


def parameters(shape: str) -> tuple[int, int]:
    """Number of parameters that are read for one token, with the output head and without it."""
    s = HYBRIDS[shape]
    hidden, mlp = s["hidden_size"], 3 * s["hidden_size"] * s["intermediate_size"]
    heads, kv = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
    gates = heads if "linear_num_value_heads" in s else 0
    full = hidden * (2 * heads + gates + 2 * kv) + mlp
    inner = s["num_hidden_layers"] * full
    if gates:
        keys = s["linear_num_key_heads"] * s["linear_key_head_dim"]
        values = s["linear_num_value_heads"] * s["linear_value_head_dim"]
        inner += s["num_hidden_layers"] * 3 // 4 * (hidden * (2 * keys + 3 * values) + mlp - full)
    return inner + s["vocab_size"] * hidden, inner


def write(shape: str, out: Path, seed: int) -> None:
    """Write the checkpoint, as transformers saves it."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    same: dict[str, Any] = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16"}
    model: Any
    if shape == "qwen3-0.8b":
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        model = Qwen3ForCausalLM(Qwen3Config(**HYBRIDS[shape], rope_parameters=rope, **same))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRIDS[shape], **same))
    model.to(torch.bfloat16).save_pretrained(out)
