"""Makes the `config.json` of a model in GGUF from the settings of its file.

The inverse of llama.cpp's converter (conversion/*.py). Torch-free.
"""

from array import array
from typing import Any

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.gguf_header import FLOATS
from oarlock.workers.weights.gguf_model import ROPE_FACTORS, GGUFModel, Settings, shortest

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Gemma's largest models divide scores by the root of another number than the width of a head. The files do not say so;
# llama.cpp knows these models by their number of layers.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_MAX_POSITIONS = 131_072  # of Gemma 3, whose first files do not say it


def hf_config(model: GGUFModel) -> dict[str, Any]:
    """The settings of `config.json`. Raises `StartupError` for an architecture that is not served."""
    settings = Settings(model)
    name = settings.architecture
    if settings.count(".expert_count", 0) > 0:
        raise StartupError(
            f"{model.path} is a mixture of {settings.count('.expert_count')} experts, which is not supported.",
            "Use a dense model.",
        )
    heads = settings.count(".attention.head_count", 8 if name == "gemma3" else None)
    hidden = settings.count(".embedding_length")
    if not heads:
        raise StartupError(f"{model.path} has no attention heads.", "Use a dense decoder model.")
    head_dim = settings.count(".attention.key_length", hidden // heads)
    if settings.count(".attention.value_length", head_dim) != head_dim:
        raise StartupError(f"{model.path} has heads of keys and of values that differ in width.", "Use another model.")
    default_kv = 4 if name == "gemma3" else heads
    config = {
        "architectures": [_CLASSES[name]],
        "model_type": {"gemma3": "gemma3_text"}.get(name, name),
        "vocab_size": _vocab_size(model),
        "hidden_size": hidden,
        "num_hidden_layers": settings.count(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count(".attention.head_count_kv", default_kv),
        "head_dim": head_dim,
        "intermediate_size": settings.count(".feed_forward_length"),
        "max_position_embeddings": settings.count(".context_length", _MAX_POSITIONS if name == "gemma3" else 0),
        "rms_norm_eps": settings.number(".attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": settings.number(".rope.freq_base", 1_000_000.0 if name == "gemma3" else 10_000.0),
        "rope_scaling": _rope_scaling(settings, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": _dtype(model),
    }
    for key, setting in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if settings.has(f"tokenizer.ggml.{setting}_token_id"):
            config[f"{key}_token_id"] = settings.count(f"tokenizer.ggml.{setting}_token_id")
    return config | _OWN[name](settings, config)


def _llama(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in settings.model.tensors,
    }
    _check_whole_heads(settings, config["head_dim"])
    window = settings.count(".attention.sliding_window", 0)
    return own | ({"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {})


def _qwen(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    _check_whole_heads(settings, config["head_dim"])
    own: dict[str, Any] = {"use_sliding_window": False}
    if settings.architecture == "qwen3":
        own["attention_bias"] = "blk.0.attn_q.bias" in settings.model.tensors
    return own


def _phi3(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    rotated = settings.count(".rope.dimension_count", config["head_dim"])
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "sliding_window": settings.count(".attention.sliding_window", 0) or None,
        "original_max_position_embeddings": settings.count(
            ".rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _gemma(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    name, layers = settings.architecture, config["num_hidden_layers"]
    is_27b = layers == _LAYERS_OF_27B[name]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    own: dict[str, Any] = {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    softcaps = (("attn_logit", 50.0), ("final_logit", 30.0)) if name == "gemma2" else (("final_logit", 0.0),)
    for key, default in softcaps:
        own[f"{key}_softcapping"] = settings.number(f".{key}_softcapping", default) or None
    window = settings.count(".attention.sliding_window", 4096 if name == "gemma2" else 0)
    own["sliding_window"] = window or None
    if not window:
        own["layer_types"] = ["full_attention"] * layers
    if name == "gemma3":
        own["rope_local_base_freq"] = settings.number(".rope.freq_base_swa", 10_000.0)
    return own


_OWN = {"llama": _llama, "qwen2": _qwen, "qwen3": _qwen, "phi3": _phi3, "gemma2": _gemma, "gemma3": _gemma}


def _check_whole_heads(settings: Settings, head_dim: int) -> None:
    rotated = settings.count(".rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise StartupError(
            f"{settings.model.path} rotates {rotated} of {head_dim} elements of a head, which "
            f"{settings.architecture} models do not.",
            "Use the model's safetensors checkpoint.",
        )


def _vocab_size(model: GGUFModel) -> int:
    found = model.tensors.get("token_embd.weight")
    if found is None:
        raise StartupError(
            f"{model.path} holds no tensor 'token_embd.weight'.", "Use a file that holds the whole model."
        )
    return found.entry.shape[0]


def _dtype(model: GGUFModel) -> str:
    """The type to compute in: that of the matrices if they are all of one, else bfloat16."""
    types = {found.entry.dtype for found in model.tensors.values() if len(found.entry.shape) == 2}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names[types.pop()] if len(types) == 1 and types <= set(FLOATS) else "bfloat16"


def _rope_scaling(settings: Settings, head_dim: int) -> dict[str, Any] | None:
    kind = settings.text(".rope.scaling.type", "none")
    plain, short, long = (_rope_factors(settings.model, name) for name in ROPE_FACTORS)
    if short or long:  # Phi-3
        table: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if settings.has(".rope.scaling.attn_factor"):
            table["attention_factor"] = settings.number(".rope.scaling.attn_factor")
        return table
    if plain:  # Llama 3.x: what its rope type `llama3` makes of each frequency
        length = settings.count(".context_length")
        return {
            "rope_type": "longrope",
            "short_factor": plain,
            "long_factor": plain,
            "original_max_position_embeddings": length,
        }
    if kind in ("none", "longrope"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": settings.number(".rope.scaling.factor")}
    if kind != "yarn":
        raise StartupError(
            f"{settings.model.path}: rope scaling {kind[:80]!r} is not supported.", "Supported: none, linear, yarn."
        )
    table = {
        "rope_type": "yarn",
        "factor": settings.number(".rope.scaling.factor"),
        "original_max_position_embeddings": settings.count(".rope.scaling.original_context_length"),
    }
    own = (("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"))
    for key, setting in own:
        if settings.has(f".rope.scaling.{setting}"):
            table[key] = settings.number(f".rope.scaling.{setting}")
    return table


def _rope_factors(model: GGUFModel, name: str) -> list[float]:
    """A small tensor of the file, which belongs to the model's description; an empty list if it is not there."""
    found = model.tensors.get(name)
    if found is None:
        return []
    if found.entry.dtype != "F32" or len(found.entry.shape) != 1:
        raise StartupError(f"{found.path}: tensor {name!r} is not a row of F32.", "Use another file of the model.")
    factors = array("f")
    with found.path.open("rb") as file:
        file.seek(found.entry.begin)
        factors.frombytes(file.read(found.entry.end - found.entry.begin))
    return [shortest(factor) for factor in factors]
