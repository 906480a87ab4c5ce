"""Writes checkpoints with latent attention as GGUF files, as llama.cpp's converter does, with the names of `gguf`.

Apart from the reader that it judges: it takes no name and no layout from there.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.gguf_blocks import quantized

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV32ForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "Glm4MoeLiteForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "GlmMoeDsaForCausalLM": gguf.MODEL_ARCH.GLM_DSA,
    "KimiLinearForCausalLM": gguf.MODEL_ARCH.KIMI_LINEAR,
    "MiniCPM3ForCausalLM": gguf.MODEL_ARCH.MINICPM3,
    "YoutuForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
}
# Names that the package does not have yet: the tensors are those of the architecture above.
NEWER = {"DeepseekV32ForCausalLM": "deepseek32"}
# Keys of Kimi Linear's settings, and of its tensors, that other families name otherwise.
_USUAL = {"model_max_length": "max_position_embeddings", "num_experts": "n_routed_experts",
          "num_local_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
          "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group",
          "moe_renormalize": "norm_topk_prob"}  # fmt: skip
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_latent_gguf(directory: Path, path: Path, *, splits: bool, kind: str = "F32") -> Path:
    """The checkpoint in `directory` as the file `path`. `splits`: as newer converters write it, with the matrices of
    each head's keys, transposed, and of its values as two stacks. `kind`: of these matrices; the rest is F32."""
    config = json.loads((directory / "config.json").read_text())
    config = {_USUAL.get(key, key): value for key, value in config.items()}
    (name,) = config["architectures"]
    arch = ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, NEWER.get(name, gguf.MODEL_ARCH_NAMES[arch]))
    _add_settings(writer, config, arch, splits)
    if "n_routed_experts" in config:
        _add_experts(writer, config, splits)
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _as_stored(tensors, config, splits).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("e_score_correction_bias"):
            stored = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        assert stored is not None, name
        of = kind if re.search(r"(kv_b|k_b|v_b)_proj", name) else "F32"
        values = quantized(tensor.float().contiguous().numpy(), of)
        writer.add_tensor(stored, values, raw_dtype=gguf.GGMLQuantizationType[of])
    for name in ("long", "short") if "short_factor" in config.get("rope_parameters", ()) else ():
        writer.add_tensor(
            f"rope_factors_{name}.weight", torch.tensor(config["rope_parameters"][f"{name}_factor"]).numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], arch: gguf.MODEL_ARCH, splits: bool) -> None:
    heads, rotated = config["num_attention_heads"], config["qk_rope_head_dim"]
    key, rank = config["qk_nope_head_dim"] + rotated, config["kv_lora_rank"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rotated)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if splits:
        if arch is not gguf.MODEL_ARCH.KIMI_LINEAR:
            writer.add_head_count_kv(1)
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config["v_head_dim"])
    else:
        writer.add_head_count_kv(heads)
        writer.add_key_length(key)
        if arch is not gguf.MODEL_ARCH.MINICPM3:
            writer.add_value_length(config["v_head_dim"])
    if arch is gguf.MODEL_ARCH.KIMI_LINEAR:
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
        writer.add_kda_head_dim(config["linear_head_dim"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    if arch in (gguf.MODEL_ARCH.MINICPM3, gguf.MODEL_ARCH.KIMI_LINEAR):
        return
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any], splits: bool) -> None:
    is_second, kinds = config["model_type"] == "deepseek_v2", config.get("mlp_layer_types")
    scores = gguf.ExpertGatingFuncType.SOFTMAX if is_second else gguf.ExpertGatingFuncType.SIGMOID
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(kinds.count("dense") if kinds else config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if splits or not is_second:  # the oldest files have no scores, which were softmax
        writer.add_expert_gating_func(scores)
    if splits:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if not is_second and config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if "index_topk" in config:
        writer.add_indexer_top_k(config["index_topk"])


def _as_stored(tensors: dict[str, Tensor], config: dict[str, Any], splits: bool) -> dict[str, Tensor]:
    """The tensors under names that the package knows, with the converter's shapes."""
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, Tensor]] = {}
    for stored, tensor in tensors.items():
        name = re.sub(r"block_sparse_moe(\.experts\.\d+\.)(w\d)", lambda m: f"mlp{m[1]}{_EXPERTS[m[2]]}", stored)
        name = re.sub(r"block_sparse_moe(\.\w+_proj)", r"mlp\1", name)  # of a dense layer
        if match := re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(\w+\.weight)", name):
            apart.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif name.endswith("kv_b_proj.weight") and splits:
            of_heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = of_heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = values
        elif name.endswith("conv1d.weight"):
            found[name] = tensor.reshape(1, tensor.shape[0], 1, tensor.shape[-1])
        elif name.endswith(".A_log"):
            found[name] = -tensor.float().exp()
        else:
            found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found | {name: torch.stack([of[index] for index in sorted(of)]) for name, of in apart.items()}
