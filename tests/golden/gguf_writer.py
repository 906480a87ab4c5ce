"""Writes a Hugging Face checkpoint as a GGUF file, as llama.cpp's converter does, with the `gguf` package's names.

Apart from the reader that it judges: it takes no name and no layout from there.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.golden.gguf_blocks import quantized

_WITH_EXPERTS_AND_PATTERN = ("exaone_moe", "mellum", "cohere2_moe")
_NEWER = {"Cohere2MoeForCausalLM": "cohere2moe", "HYV3ForCausalLM": "hy_v3", "MellumForCausalLM": "mellum"}
_ARCHITECTURES = {
    "GPT2LMHeadModel": gguf.MODEL_ARCH.GPT2,
    "GPTBigCodeForCausalLM": gguf.MODEL_ARCH.STARCODER,
    "PhiForCausalLM": gguf.MODEL_ARCH.PHI2,
    "GPTNeoXForCausalLM": gguf.MODEL_ARCH.GPTNEOX,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "CohereForCausalLM": gguf.MODEL_ARCH.COMMAND_R,
    "Cohere2ForCausalLM": gguf.MODEL_ARCH.COHERE2,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2MoeForCausalLM": gguf.MODEL_ARCH.QWEN2MOE,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "Glm4MoeForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "Ernie4_5_MoeForCausalLM": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "Dots1ForCausalLM": gguf.MODEL_ARCH.DOTS1,
    "ExaoneMoeForCausalLM": gguf.MODEL_ARCH.EXAONE_MOE,
    "SolarOpenForCausalLM": gguf.MODEL_ARCH.GLM4_MOE,
    "MiniMaxM2ForCausalLM": gguf.MODEL_ARCH.MINIMAXM2,
    "PhimoeForCausalLM": gguf.MODEL_ARCH.PHIMOE,
    # Newer than the package: names of tensors are those of dots.llm1.
    **dict.fromkeys(_NEWER, gguf.MODEL_ARCH.DOTS1),
    "ArceeForCausalLM": gguf.MODEL_ARCH.ARCEE,
    "NemotronForCausalLM": gguf.MODEL_ARCH.NEMOTRON,
    "Jais2ForCausalLM": gguf.MODEL_ARCH.JAIS2,
    "Starcoder2ForCausalLM": gguf.MODEL_ARCH.STARCODER2,
    "OlmoForCausalLM": gguf.MODEL_ARCH.OLMO,
    "Ernie4_5ForCausalLM": gguf.MODEL_ARCH.ERNIE4_5,
    "Exaone4ForCausalLM": gguf.MODEL_ARCH.EXAONE4,
    "GemmaForCausalLM": gguf.MODEL_ARCH.GEMMA,
    "GlmForCausalLM": gguf.MODEL_ARCH.CHATGLM,
    "Glm4ForCausalLM": gguf.MODEL_ARCH.GLM4,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "SeedOssForCausalLM": gguf.MODEL_ARCH.SEED_OSS,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "StableLmForCausalLM": gguf.MODEL_ARCH.STABLELM,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "HunYuanDenseV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "HunYuanMoEV1ForCausalLM": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "AfmoeForCausalLM": gguf.MODEL_ARCH.AFMOE,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Gemma4UnifiedForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "Llama4ForCausalLM": gguf.MODEL_ARCH.LLAMA4,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
}
_TILED = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)  # value heads of gated delta nets
# Settings of config.json, and the writer's method for each.
_ADDED = (
    ("attn_logit_softcapping", "add_attn_logit_softcapping"),
    ("final_logit_softcapping", "add_final_logit_softcapping"),
    ("sliding_window", "add_sliding_window"),
    ("logit_scale", "add_logit_scale"),
    ("logits_scaling", "add_logit_scale"),
    ("attention_multiplier", "add_attention_scale"),
    ("embedding_multiplier", "add_embedding_scale"),
    ("residual_multiplier", "add_residual_scale"),
    ("num_experts", "add_expert_count"),
    ("num_local_experts", "add_expert_count"),
    ("num_experts_per_tok", "add_expert_used_count"),
    ("moe_intermediate_size", "add_expert_feed_forward_length"),
    ("shared_expert_intermediate_size", "add_expert_shared_feed_forward_length"),
    ("shared_intermediate_size", "add_expert_shared_feed_forward_length"),
    ("n_routed_experts", "add_expert_count"),
    ("moe_num_experts", "add_expert_count"),
    ("moe_k", "add_expert_used_count"),
    ("n_shared_experts", "add_expert_shared_count"),
    ("moe_num_shared_experts", "add_expert_shared_count"),
    ("first_k_dense_replace", "add_leading_dense_block_count"),
    ("moe_layer_start_index", "add_leading_dense_block_count"),
    ("moe_layer_interval", "add_interleave_moe_layer_step"),
    ("routed_scaling_factor", "add_expert_weights_scale"),
    ("router_scaling_factor", "add_expert_weights_scale"),
    ("num_shared_experts", "add_expert_shared_count"),
    ("norm_topk_prob", "add_expert_weights_norm"),
    ("n_group", "add_expert_group_count"),
    ("topk_group", "add_expert_group_used_count"),
    ("clip_qkv", "add_clamp_kqv"),
    ("moe_topk", "add_expert_used_count"),
    ("num_shared_experts", "add_expert_shared_count"),
    ("num_dense_layers", "add_leading_dense_block_count"),
    ("route_scale", "add_expert_weights_scale"),
    ("interleave_moe_layer_step", "add_interleave_moe_layer_step"),
)
_LAYER_NORMS = ("layer_norm_eps", "norm_epsilon", "norm_eps")
_ONE_ADDED = (  # to the weights of norms
    gguf.MODEL_ARCH.GEMMA,
    gguf.MODEL_ARCH.GEMMA2,
    gguf.MODEL_ARCH.GEMMA3,
    gguf.MODEL_ARCH.NEMOTRON,
    gguf.MODEL_ARCH.QWEN3NEXT,
    *_TILED,
)
_OWN_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner":
    "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
_PERMUTED = (
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.GRANITE_MOE,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.ARCEE,
    gguf.MODEL_ARCH.OLMO,
    gguf.MODEL_ARCH.MISTRAL3,
)
_WITH_PATTERN = (gguf.MODEL_ARCH.EXAONE4, gguf.MODEL_ARCH.OLMO2)  # of windows
_EXPERT = re.compile(r"(.*\.)(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight")
_NUMBERED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names
KindOf = Callable[[str, tuple[int, ...]], str]


def all_of(kind: str) -> KindOf:
    """Matrices as `kind`, vectors as F32."""
    return lambda name, shape: kind if len(shape) >= 2 else "F32"


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """The mix of types of files named Q4_K_M, with the types they fall back to where a row is no whole block."""
    if len(shape) == 1:
        return "F32"
    better = name in ("token_embd.weight", "output.weight") or ("blk.0." in name and ("_v." in name or "down" in name))
    if shape[1] % 256:
        return "Q8_0" if better else "Q5_0"
    return "Q6_K" if better else "Q4_K"


def write_gguf(directory: Path, path: Path, kind_of: KindOf, *, part_bytes: int = 0, **settings: Any) -> Path:
    """The checkpoint in `directory` as the file `path`, or with `part_bytes` in parts of about so many bytes.

    `settings` are written last, under names in which `__` is a dot; None leaves one out.
    """
    config = _with_usual_keys(json.loads((directory / "config.json").read_text()))
    arch = _ARCHITECTURES[config["architectures"][0]]
    known_as = _NEWER.get(config["architectures"][0], gguf.MODEL_ARCH_NAMES[arch])
    writer = gguf.GGUFWriter(path, known_as, split_max_size=part_bytes)
    _add_settings(writer, config, arch)
    if (directory / "tokenizer.json").exists():
        add_tokenizer(writer, directory, config["vocab_size"])
    for key, value in settings.items():
        _set(writer, key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    for name, tensor in _with_split_projections(_with_joined_experts(tensors), config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("e_score_correction_bias"):
            stored = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        elif name.endswith("layer_scalar") or name.endswith("sinks"):
            stored = f"{stored}.weight"
        elif name.endswith("expert_bias"):
            stored = f"{stored}.bias"
        assert stored is not None, name
        numbers = _as_stored(name, tensor.float(), config, arch).numpy()
        kind = "F32" if "ssm_conv1d" in stored else kind_of(stored, numbers.shape)
        writer.add_tensor(stored, quantized(numbers, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, factors in _rope_factors(config, arch).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_joined_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for gate, up and down of all experts of a layer."""
    found: dict[str, torch.Tensor] = {}
    apart: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, module = name.partition("block_sparse_moe.") if "moe" in name else name.partition("shared_mlp.")
        inside = "mlp.shared_expert." if "shared_mlp" in name else "mlp.experts."
        if match := _EXPERT.fullmatch(name):
            part = _NUMBERED.get(match[3], match[3])
            apart.setdefault(f"{match[1]}mlp.experts.{part}.weight", {})[int(match[2])] = tensor
        elif module == "input_linear.weight":
            for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
                found[f"{layer}{inside}{part}_proj.weight"] = half
        elif module == "output_linear.weight":
            found[f"{layer}{inside}down_proj.weight"] = tensor
        elif name.endswith("feed_forward.experts.gate_up_proj"):  # Llama 4: transposed, gate before up
            for part, half in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, 1), strict=True):
                found[f"{name[: -len('gate_up_proj')]}{part}_proj.weight"] = half
        elif name.endswith("experts.down_proj"):  # gpt-oss: transposed, and rows of gate and up take turns
            found[f"{name}.weight"] = tensor.transpose(1, 2)
        elif name.endswith("experts.gate_up_proj"):
            for number, part in enumerate(("gate", "up")):
                found[f"{name[: -len('gate_up_proj')]}{part}_proj.weight"] = tensor.transpose(1, 2)[:, number::2]
        elif name.endswith("experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = tensor
        elif name.endswith("experts.gate_up_proj_bias"):
            for number, part in enumerate(("gate", "up")):
                found[f"{name[: -len('gate_up_proj_bias')]}{part}_proj.bias"] = tensor[:, number::2]
        elif name.endswith("e_score_correction_bias"):
            found[name] = tensor.flatten()
        else:
            found[name] = tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor
    return found | {name: torch.stack([of[index] for index in sorted(of)]) for name, of in apart.items()}


def _with_split_projections(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Qwen3-Next's projections one after another instead of by key heads, and the names of biases of time steps."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            each = config["linear_num_value_heads"] // config["linear_num_key_heads"]
            key, value = config["linear_key_head_dim"], each * config["linear_value_head_dim"]
            of_heads = tensor.unflatten(0, (config["linear_num_key_heads"], -1)).split([key, key, value, value], 1)
            q, k, v, z = (part.flatten(0, 1) for part in of_heads)
            found |= {name.replace("qkvz", "qkv"): torch.cat((q, k, v)), name.replace("qkvz", "z"): z}
        else:
            found[name.replace("dt_bias", "dt_proj.bias")] = tensor
    return found


def _with_usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of GPT-2 and GPT-BigCode under the keys that others have."""
    found = {ours: config[theirs] for theirs, ours in _OWN_KEYS.items() if config.get(theirs) is not None}
    config = {**config, **found}
    return {**config, "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"]}


def _set(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    settings = writer.kv_data[0]
    settings.pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> None:
    heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    ahead = config.get("num_nextn_predict_layers") or 0  # layers, which are counted among the others
    writer.add_block_count(config["num_hidden_layers"] + ahead)
    if ahead:
        writer.add_nextn_predict_layers(ahead)
    if "moe_intermediate_size" not in config or config["model_type"] != "qwen3_5_moe_text":  # which has experts only
        writer.add_feed_forward_length(config.get("intermediate_size_mlp", config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if key := next((key for key in _LAYER_NORMS if key in config), None):
        writer.add_layer_norm_eps(config[key])
    elif arch is gguf.MODEL_ARCH.OLMO:
        writer.add_layer_norm_eps(1e-5)
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rope_theta" in full:
        writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    elif full.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    if arch is gguf.MODEL_ARCH.GPTNEOX:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config.get("multi_query"):
        writer.kv_data[0].pop("starcoder.attention.head_count_kv")
        writer.add_head_count_kv(1)
    for key, method in _ADDED:
        if config.get(key):
            getattr(writer, method)(config[key])
    if (arch in _WITH_PATTERN or config["model_type"] in _WITH_EXPERTS_AND_PATTERN) and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch is gguf.MODEL_ARCH.STABLELM:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    _add_experts(writer, config)
    if "linear_num_key_heads" in config:
        _add_delta(writer, config)
    _OF_LAYERS.get(config["model_type"], lambda *_: None)(writer, config)
    if arch in (gguf.MODEL_ARCH.PHI3, gguf.MODEL_ARCH.STARCODER2) and not config.get("sliding_window"):
        writer.add_sliding_window(0)


def _add_convolutions(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    name, width = writer.arch, config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        width, unit = int(config["block_ffn_dim_multiplier"] * (2 * width // 3)), config["block_multiple_of"]
        width = -(-width // unit) * unit
    heads = [config["num_key_value_heads"] if kind != "conv" else 0 for kind in config["layer_types"]]
    _set(writer, f"{name}.attention.head_count_kv", heads)
    _set(writer, f"{name}.feed_forward_length", width)
    _set(writer, f"{name}.attention.layer_norm_epsilon", None)
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if name == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    slides, shared = [kind == "sliding_attention" for kind in config["layer_types"]], config["num_kv_shared_layers"]
    own = config["per_layer_config"]
    full = next(iter(own.values()))
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(slides)
    for key, value in (("key_length", full["head_dim"]), ("value_length", full["head_dim"])):
        _set(writer, f"gemma4.attention.{key}", value)
        _set(writer, f"gemma4.attention.{key}_swa", config["head_dim"])
    _set(writer, "gemma4.rope.dimension_count", full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    width, first = config["intermediate_size"], len(slides) - shared
    if config["use_double_wide_mlp"]:
        _set(writer, "gemma4.feed_forward_length", [width * (1 + (index >= first)) for index in range(len(slides))])
    if "num_key_value_heads" in full:
        heads = [config["num_key_value_heads"] if slide else full["num_key_value_heads"] for slide in slides]
        _set(writer, "gemma4.attention.head_count_kv", heads)


def _add_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    family = config["model_type"]
    if family in ("gpt_oss", "minimax_m2", "cohere2_moe", "hunyuan_v1_moe", "llama4_text"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if family == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if family in ("exaone_moe", "hy_v3"):
        width = config["moe_intermediate_size"] * config["num_shared_experts"]
        writer.add_expert_shared_feed_forward_length(width)
    if family in ("dots1", "minimax_m2", "hy_v3", "cohere2_moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if family == "cohere2_moe":
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))


# Families whose layers differ.
_OF_LAYERS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "lfm2": _add_convolutions, "lfm2_moe": _add_convolutions, "gemma4_text": _add_gemma4,
    "gemma4_unified_text": _add_gemma4,
}  # fmt: skip


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path, vocab_size: int) -> None:
    """A byte-level tokenizer, as `_set_vocab_gpt2` of the converter does. `tokenizer.ggml.pre` is the caller's."""
    described = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in described["added_tokens"]}
    ids = described["model"]["vocab"] | {token: entry["id"] for token, entry in added.items()}
    by_id = {index: token for token, index in ids.items()}
    types = gguf.TokenType
    kinds = []
    for index in range(vocab_size):
        token = by_id.get(index)
        special = types.CONTROL if token in added and added[token]["special"] else types.USER_DEFINED
        kinds.append(types.UNUSED if token is None else special if token in added else types.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types(kinds)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    _set(writer, "tokenizer.ggml.merges", merges or ["\u0120 \u0120"])  # an array cannot be empty
    for name in ("bos", "eos", "pad"):
        token = config.get(f"{name}_token")
        if token is not None:
            name = {"pad": "padding"}.get(name, name)
            writer.add_uint32(
                f"tokenizer.ggml.{name}_token_id", ids[token if isinstance(token, str) else token["content"]]
            )
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


def _as_stored(name: str, tensor: torch.Tensor, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> torch.Tensor:
    if name.endswith("conv.conv.weight"):
        return tensor.squeeze(1)
    if arch in _ONE_ADDED and name.endswith("norm.weight") and "linear_attn" not in name:
        return tensor + 1
    if "linear_attn" in name:
        return _delta_as_stored(name, tensor, config, arch)
    if arch in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if arch is gguf.MODEL_ARCH.GPT2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T.contiguous()
    if arch is gguf.MODEL_ARCH.GPTNEOX and ".query_key_value." in name:
        of_heads = tensor.unflatten(0, (config["num_attention_heads"], 3, -1))
        return of_heads.swapaxes(0, 1).reshape(tensor.shape)
    return tensor


def _delta_as_stored(name: str, tensor: torch.Tensor, config: dict[str, Any], arch: gguf.MODEL_ARCH) -> torch.Tensor:
    """Decays in place of their logarithms, taps as a matrix, and value heads in turn for all key heads."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = 1 if name.endswith(("A_log", "dt_proj.bias", "in_proj_a.weight", "in_proj_b.weight")) else (
        config["linear_value_head_dim"])  # fmt: skip
    tensor = -torch.exp(tensor) if name.endswith("A_log") else tensor
    tensor = tensor.squeeze(1) if "conv1d" in name else tensor
    if arch not in _TILED or name.endswith("norm.weight"):
        return tensor
    if "out_proj" in name:
        return tensor.unflatten(1, (keys, values // keys, width)).transpose(1, 2).flatten(1).contiguous()
    rows = values * width
    of_heads = tensor[len(tensor) - rows :].unflatten(0, (keys, values // keys, width))
    return torch.cat((tensor[: len(tensor) - rows], of_heads.transpose(0, 1).flatten(0, 2)))


def _rope_factors(config: dict[str, Any], arch: gguf.MODEL_ARCH) -> dict[str, list[float]]:
    """Llama 3's and Phi-3's factors, which are tensors in GGUF."""
    rope = config.get("rope_parameters") or {}
    if arch is gguf.MODEL_ARCH.GEMMA4:
        width = next(iter(config["per_layer_config"].values()))["head_dim"]
        rotated = int(width * rope["full_attention"]["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": [1.0] * rotated + [1e30] * (width // 2 - rotated)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": rope[f"{name}_factor"] for name in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for pair in range(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (pair / head_dim)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}
