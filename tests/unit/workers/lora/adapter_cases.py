"""Adapters written by hand for small models, and the values of their pairs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oarlock.workers.adapter_digest import WEIGHTS_FILE
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_pair import AdapterMatrix
from oarlock.workers.models.registry import describe

_LLAMA = {
    "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 2}
_DELTA = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 3,
    "linear_value_head_dim": 5, "partial_rotary_factor": 0.5,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "PhiForCausalLM": {"num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "Phi3ForCausalLM": {},
    "GPT2LMHeadModel": {
        "num_key_value_heads": 4, "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "tie_word_embeddings": True,
    },
    "GPTNeoXForCausalLM": {"num_key_value_heads": 4, "rotary_pct": 1.0},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": _EXPERTS,
    "GptOssForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 2},
    "Qwen3_5ForCausalLM": {**_DELTA, "head_dim": 4},
    "Qwen3NextForCausalLM": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 10, "head_dim": 4},
}  # fmt: skip


def spec_of(architecture: str, **settings: Any) -> DecoderSpec:
    """Return the description of a small model."""
    return describe({"architectures": [architecture], **_LLAMA, **SIZES[architecture], **settings})


def write(directory: Path, shapes: Mapping[str, tuple[int, ...]], **config: Any) -> dict[str, Tensor]:
    """Write an adapter of tensors of these shapes, of rank 2 and alpha 6 by default, and return them."""
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": None, **config}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def halves(module: str, inputs: int, outputs: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two tensors that PEFT saves for a linear layer."""
    before = f"base_model.model.{module}.lora_"
    return {f"{before}A.weight": (rank, inputs), f"{before}B.weight": (outputs, rank)}


def updates(adapter: Adapter) -> dict[str, Tensor]:
    """Return the update of each pair, which is added to its module's matrix: [outputs, inputs]."""
    return {pair.module: pair.scale * values(pair.b) @ values(pair.a) for pair in adapter.pairs}


def values(half: AdapterMatrix) -> Tensor:
    """Return the values of half a pair, which is stored in float32."""
    entry, path = half.located.entry, half.located.path
    data = path.read_bytes()
    start = 0 if data.startswith(b"GGUF") else 8 + int.from_bytes(data[:8], "little")
    stored = torch.frombuffer(bytearray(data[start + entry.begin : start + entry.end]), dtype=torch.float32)
    stored = stored.view(entry.shape)
    found = stored[list(half.rows.numbers())][:, list(half.columns.numbers())]
    found = found.T if half.transposed else found
    assert tuple(found.shape) == half.shape
    return found
