"""Writes checkpoints with Mamba 2 as GGUF files, as llama.cpp's converter does, with the `gguf` package's names.

Apart from the reader that it judges: it takes no name and no layout from there.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "Mamba2ForCausalLM": gguf.MODEL_ARCH.MAMBA2,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
}
_FUSED = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


def write_mamba_gguf(directory: Path, path: Path) -> Path:
    """The checkpoint in `directory` as the file `path`, all in F32."""
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    if arch is gguf.MODEL_ARCH.NEMOTRON_H_MOE and "moe" not in kinds:
        arch = gguf.MODEL_ARCH.NEMOTRON_H
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_settings(writer, config, kinds)
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    names = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers") or len(kinds))
    for name, tensor in _as_stored(tensors, config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("e_score_correction_bias"):
            stored = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        assert stored is not None, name
        writer.add_tensor(stored, tensor.float().contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    heads, layers = first("mamba_n_heads", "mamba_num_heads", "num_heads"), config.get("num_hidden_layers")
    width = first("mamba_d_head", "mamba_head_dim", "head_dim") * heads
    writer.add_block_count(layers or len(kinds))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config.get("max_position_embeddings") or 2**20)
    writer.add_layer_norm_rms_eps(first("rms_norm_eps", "layer_norm_epsilon"))
    writer.add_ssm_conv_kernel(first("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_inner_size(width)
    writer.add_ssm_state_size(first("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(first("mamba_n_groups", "n_groups"))
    if not config.get("num_attention_heads"):
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
        return
    writer.add_head_count(config["num_attention_heads"])
    has_attention = [kind == "full_attention" for kind in kinds] if "hybrid" not in kinds else []
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads * one for one in has_attention] if has_attention else kv_heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    dense = config["model_type"] == "granitemoehybrid" and not config["num_local_experts"]
    inner = config["shared_intermediate_size" if dense else "intermediate_size"]
    is_nemotron = config["model_type"] == "nemotron_h"
    writer.add_feed_forward_length([inner * (kind == "mlp") for kind in kinds] if is_nemotron else inner)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    _add_own(writer, config, kinds)


def _add_own(writer: gguf.GGUFWriter, config: dict[str, Any], kinds: list[str]) -> None:
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        if config["num_local_experts"]:
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    elif "moe" in kinds:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _as_stored(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors under names that the package knows, with the converter's values and shapes."""
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, Tensor]] = {}
    for stored, tensor in tensors.items():
        name = stored.replace("dt_bias", "dt_proj.bias")
        if match := re.fullmatch(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+\.weight)", name):
            apart.setdefault(f"model.layers.{match[1]}.mlp.experts.{match[3]}", {})[int(match[2])] = tensor
            continue
        if match := re.fullmatch(r"(.*)\.(block_sparse_moe|shared_mlp)\.(input_linear|output_linear)\.weight", name):
            shared = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            inside = shared if match[2] == "shared_mlp" else "mlp.experts"
            parts = _FUSED[match[3]]
            for part, rows in zip(parts, tensor.chunk(len(parts), -2), strict=True):
                found[f"{match[1]}.{inside}.{part}.weight"] = rows
            continue
        found[name] = _values(name, tensor, config)
    return found | {name: torch.stack([of[index] for index in sorted(of)]) for name, of in apart.items()}


def _values(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    if name.endswith("A_log"):
        return -torch.exp(tensor).unsqueeze(1)
    if name.endswith(".D"):
        return tensor.unsqueeze(1)
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.unflatten(0, (config.get("mamba_n_groups") or config["n_groups"], -1))
    if config["model_type"] == "granitemoehybrid" and re.search(r"\.[qk]_proj\.", name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return _multiplied(name, tensor, config) if config["model_type"] == "falcon_h1" else tensor


def _multiplied(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Falcon-H1's weights, times its multipliers."""
    scale = config["attention_in_multiplier"]
    factors = {
        "q_proj": scale, "k_proj": scale * config["key_multiplier"], "v_proj": scale, "lm_head":
        config["lm_head_multiplier"], "o_proj": config["attention_out_multiplier"], "out_proj":
        config["ssm_out_multiplier"], "gate_proj": config["mlp_multipliers"][0], "down_proj":
        config["mlp_multipliers"][1], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    module = name.split(".")[-2]
    if module != "in_proj":
        return tensor * factors.get(module, 1.0)
    width, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = (width, width, group, group, config["mamba_n_heads"])
    parts = zip(tensor.split(rows), config["ssm_multipliers"], strict=True)
    return torch.cat([part * factor for part, factor in parts]) * config["ssm_in_multiplier"]
