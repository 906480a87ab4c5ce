"""Reads a Hugging Face `config.json` into the parts that all families share, with transformers' own defaults.

The only place that knows its key names, old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`). A value that
would change the mathematics and is not understood is refused, never skipped. Torch-free.
"""

import math
from dataclasses import replace
from typing import Any

from workers.errors import StartupError
from workers.models.spec import DecoderSpec, RopeSpec

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_DTYPES = ("bfloat16", "float16", "float32")
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
    "finetuned",  # a note of old YaRN checkpoints, without effect
}
# Keys of neighbouring architectures that alter the forward pass; with another value than these they are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "kv_lora_rank": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "use_parallel_residual": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
}


def unsupported(key: str, value: Any, fix: str) -> StartupError:
    return StartupError(f"config.json: {key} = {value!r} is not supported.", fix)


class Fields:
    """Typed access to one `config.json`; complaints name the key."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.raw = config
        for key, neutral in _NEUTRAL.items():
            if config.get(key) not in neutral:
                raise unsupported(key, config[key], "This architecture is served only without it.")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise StartupError(f"config.json: {key} must be a positive integer, got {value!r}.", "Repair config.json.")
        return value

    def number(self, key: str, default: float) -> float:
        return _number(key, self.raw.get(key), default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise StartupError(f"config.json: {key} must be true or false, got {value!r}.", "Repair config.json.")
        return value


def _number(key: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise StartupError(f"config.json: {key} must be a positive number, got {value!r}.", "Repair config.json.")
    return float(value)


def decoder_spec(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    max_positions: int,
    windows: tuple[int | None, ...],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderSpec:
    """The parts every family reads alike. The keyword arguments are the family's defaults and its own settings."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise StartupError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly.",
            "Repair num_attention_heads or num_key_value_heads.",
        )
    head_dim = fields.count("head_dim", head_dim or max(1, hidden // heads))
    activation = fields.raw.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise unsupported("hidden_act", activation, f"Supported: {', '.join(_ACTIVATIONS)}.")
    positions = fields.count("max_position_embeddings", max_positions)
    return DecoderSpec(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=positions,
        rope=rope_spec(fields, head_dim, positions),
        windows=windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation=_ACTIVATIONS[activation],
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=_dtype(fields.raw),
    )


def _dtype(config: dict[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise unsupported("torch_dtype", value, f"Supported: {', '.join(_DTYPES)}.")
    return name


def layer_windows(fields: Fields, window: int | None, first_sliding: int) -> tuple[int | None, ...]:
    """One window per layer: `layer_types` where the config lists them, else sliding from layer `first_sliding` on."""
    layers = fields.count("num_hidden_layers")
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return tuple(window if index >= first_sliding else None for index in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise unsupported("layer_types", kinds, f"One of {' or '.join(known)} for each of the {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rope_spec(fields: Fields, head_dim: int, max_positions: int) -> RopeSpec:
    """`rope_scaling` has precedence over `rope_parameters`, and its inner `rope_theta` over the outer, as they have in
    transformers."""
    config = fields.raw
    inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(inner, dict):
        raise unsupported("rope_scaling", inner, "It must be a table.")
    unknown = [key for key, value in inner.items() if key not in _ROPE_KEYS and value is not None]
    kind = inner.get("rope_type", inner.get("type")) or "default"
    if unknown or kind not in _ROPE_KINDS:
        what = f"rope setting {unknown[0]}" if unknown else "rope type"
        value = inner[unknown[0]] if unknown else kind
        raise unsupported(what, value, f"Supported rope types: {', '.join(_ROPE_KINDS)}.")
    if inner.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", inner["partial_rotary_factor"], "These families rotate whole heads.")
    if head_dim % 2:
        raise unsupported("head_dim", head_dim, "Rotary embedding needs an even number.")

    def given(key: str, default: float | None = None) -> float:
        return _number(f"rope setting {key}", inner.get(key), default)

    theta = _number("rope_theta", inner.get("rope_theta", config.get("rope_theta")), 10000.0)
    plain = RopeSpec(kind, theta, head_dim)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=given("factor"))
    if kind == "dynamic":
        return replace(plain, factor=given("factor"), original_max_positions=max_positions)
    original = config.get("original_max_position_embeddings") or inner.get("original_max_position_embeddings")
    original = int(_number("rope setting original_max_position_embeddings", original, max_positions))
    if kind == "llama3":
        return replace(
            plain,
            factor=given("factor"),
            original_max_positions=original,
            low_freq_factor=given("low_freq_factor"),
            high_freq_factor=given("high_freq_factor"),
        )
    factor = given("factor", max_positions / original)
    return replace(
        plain,
        factor=factor,
        original_max_positions=original,
        attention_factor=_yarn_attention_factor(inner, factor),
        beta_fast=given("beta_fast", 32.0),
        beta_slow=given("beta_slow", 1.0),
        truncate=bool(inner.get("truncate", True)),
    )


def _yarn_attention_factor(inner: dict[str, Any], factor: float) -> float:
    """What the YaRN paper multiplies cos and sin with, unless the config fixes it."""
    explicit = inner.get("attention_factor")
    if explicit is not None:
        return _number("rope setting attention_factor", explicit, None)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = inner.get("mscale"), inner.get("mscale_all_dim")
    if over and under:
        return magnitude(float(over)) / magnitude(float(under))
    return magnitude(1.0)
