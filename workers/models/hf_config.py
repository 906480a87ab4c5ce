"""The settings of a Hugging Face `config.json` that all families share, with transformers' defaults.

`hf_fields.py` checks types and ranges, `hf_rope.py` reads the rotary settings. Torch-free.
"""

from typing import Any

from oarlock.workers.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, RopeSpec
from oarlock.workers.models.hf_fields import Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table
from oarlock.workers.platform.dtypes import ITEM_BYTES

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def decoder_spec(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    max_positions: int,
    windows: tuple[int | None, ...],
    rope: RopeSpec | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    activation: str | None = None,
    tied: bool = False,
    eps: float = 1e-6,
) -> DecoderSpec:
    """A `DecoderSpec` from the keys that all families share. The keyword arguments are the family's defaults and own
    settings; `rope` and `activation` are given where a family does not have them under the usual keys.
    """
    fields.refuse_the_rest()
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise StartupError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly.",
            "Repair num_attention_heads or num_key_value_heads.",
        )
    head_dim = head_width(fields, head_dim)
    positions = fields.count("max_position_embeddings", max_positions)
    outer = fields.raw.get("original_max_position_embeddings")
    return DecoderSpec(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.layers(),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        max_position_embeddings=positions,
        rope=rope or rope_spec(rope_table(fields), head_dim, positions, original=outer),
        windows=windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation=activation or activation_name(fields, "hidden_act", "silu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        dtype=declared_dtype(fields.raw),
    )


def head_width(fields: Fields, default: int | None) -> int:
    """Elements of one head."""
    heads = fields.count("num_attention_heads")
    return fields.count("head_dim", default or max(1, fields.count("hidden_size") // heads))


def activation_name(fields: Fields, key: str, default: str) -> str:
    return fields.choice(key, default, _ACTIVATIONS)


def declared_dtype(config: dict[str, Any]) -> str | None:
    """The dtype of the weights, as the checkpoint declares it; None where it does not."""
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise unsupported("torch_dtype", value, f"Supported: {', '.join(ITEM_BYTES)}.")
    return name


def layer_windows(fields: Fields, window: int | None, first_sliding: int) -> tuple[int | None, ...]:
    """One window per layer: `layer_types` where the config lists them, else sliding from layer `first_sliding` on."""
    layers = fields.layers()
    kinds = layer_kinds(fields)
    if kinds is None:
        return tuple(window if index >= first_sliding else None for index in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(fields: Fields) -> list[str] | None:
    """`layer_types`, checked; None where the config has none."""
    layers = fields.layers()
    kinds = fields.raw.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds)
    ):
        raise unsupported("layer_types", kinds, f"One of {' or '.join(known)} for each of the {layers} layers.")
    return kinds
