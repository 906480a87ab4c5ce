"""Gemma 2: norms before and after attention and MLP, softcaps, every other layer with a window. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec, RopeSpec
from oarlock.workers.models.hf_config import activation_name, decoder_spec, layer_kinds
from oarlock.workers.models.hf_fields import Fields, unsupported


def describe_gemma2(fields: Fields) -> DecoderSpec:
    attention_softcap = fields.number_or_none("attn_logit_softcapping", 50.0)
    logit_softcap = fields.number_or_none("final_logit_softcapping", 30.0)
    spec = gemma_spec(fields, full_every=2, max_positions=8192)
    return replace(spec, attention_softcap=attention_softcap, logit_softcap=logit_softcap)


def gemma_spec(
    fields: Fields, *, full_every: int, max_positions: int, rope: RopeSpec | None = None, qk_norm: bool = False
) -> DecoderSpec:
    """The description that Gemma 2 and 3 share. `full_every`: without `layer_types`, each such layer has no window."""
    bias = fields.flag("attention_bias", False)
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    spec = decoder_spec(
        fields,
        kv_heads=4,
        head_dim=256,
        max_positions=max_positions,
        windows=_windows(fields, full_every),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        activation=activation_name(fields, "hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
    )
    return replace(spec, query_scalar=scalar, embedding_scale=spec.hidden_size**0.5, norm_offset=1.0, post_norms=True)


def _windows(fields: Fields, full_every: int) -> tuple[int | None, ...]:
    kinds = layer_kinds(fields)
    if kinds is None:
        layers = fields.layers()
        kinds = ["sliding_attention" if (index + 1) % full_every else "full_attention" for index in range(layers)]
    if "sliding_attention" in kinds and fields.raw.get("sliding_window", 4096) is None:
        raise unsupported("sliding_window", None, "Its layers of sliding_attention need a length.")
    window = fields.count("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
