"""Checkpoints of classes without a page, which transformers' code computes, as users have them: with a chat template.

from tests.golden.class_models import make_class

path = make_class(tmp_path, "nanochat")
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # the demo model's, copied to a checkpoint
_SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2,
            "topk_group": 1}  # fmt: skip
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
           "v_head_dim": 16, "num_key_value_heads": 4}  # fmt: skip
# Widths of latent attention that C++ kernels serve, for servers that compute a class by its description.
FOR_KERNELS: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
_CLASS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {"n_routed_experts": 8, **_MIXTURE, **_LATENT},  # a mixture
    "kimi_linear": {
        "num_experts": 8,
        "num_experts_per_token": 2,
        **_MIXTURE,
        **_LATENT,
        "q_lora_rank": None,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "nanochat": {},
    "persimmon": {"num_key_value_heads": None},  # every rank holds all of it
}


def class_config(model_type: str, **overrides: Any) -> Any:
    """Return the config of a tiny model of `model_type`."""
    return AutoConfig.for_model(model_type, **{**_SHAPE, **_CLASS[model_type], **overrides})


def make_class(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write `folder/model_type` with random weights in float32, and the demo model's tokenizer and chat template."""
    path = folder / model_type
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(class_config(model_type, **overrides)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("A_log"):
                    continue
                parameter.normal_(std=0.1 if parameter.dim() > 1 else 0.02)
        model.save_pretrained(path)
    for name in _BESIDE:
        shutil.copy(DEMO / name, path / name)
    return path
