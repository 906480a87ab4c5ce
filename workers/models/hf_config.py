"""The settings of a Hugging Face `config.json` that all families share, with transformers' defaults.

`hf_fields.py` checks types and ranges, `hf_rope.py` reads the rotary settings. Torch-free.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec, PositionTable, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.hf_fields import Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table
from oarlock.workers.platform.dtypes import ITEM_BYTES

# transformers' names of the activations of a gate, of gelu, and of the activations of an MLP without a gate.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_PLAIN_ACTIVATIONS = {**GELUS, "relu": "relu", "relu2": "relu2"}

# Names of the norms before and after each branch of a layer: attention, then the MLP.
BEFORE = (("input_layernorm", None), ("post_attention_layernorm", None))
BEFORE_AND_AFTER = (
    ("input_layernorm", "post_attention_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_MOST_EXPERTS = 4096  # experts of a layer; the known maximum is 512
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Norms = tuple[tuple[str | None, str | None], tuple[str | None, str | None]]


def decoder_spec(
    fields: Fields,
    *,
    kv_heads: int | None,
    head_dim: int | None,
    max_positions: int,
    windows: tuple[int | None, ...],
    rope: RopeSpec | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    query_scalar: float | None = None,
    attention_scale: float | None = None,
    attention_softcap: float | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: str | None = None,
    gated_mlp: bool = True,
    activation: str | None = None,
    experts: Sequence[ExpertsSpec | GatedMLPSpec | None] = (),
    norm: NormSpec | None = None,
    norms: Norms = BEFORE,
    parallel: bool = False,
    residual_scale: float = 1.0,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    theta: float | None = None,
) -> DecoderSpec:
    """Return a decoder with attention and an MLP or experts in each layer, from the keys that families share.

    The keyword arguments are the family's defaults and own settings. `rope`, `activation` and `norm` are given if a
    family does not use the usual keys for them. `ropes`: one per layer, if not all layers use `rope`.
    `attention_scale`: factor of scores; None: 1 / root of `query_scalar`, or of a head's width. `qk_norm`: over each
    `head`, or over a whole `row`. `gated_mlp`: whether the MLP has a gate; without a gate, `activation` must be given.
    `experts`: one per layer, None for the usual MLP; empty: all layers have it. `theta`: default of
    `rope_theta`.
    """
    fields.refuse_the_rest()
    (heads, kv_heads), head_dim = _head_counts(fields, kv_heads), head_width(fields, head_dim)
    positions = fields.count("max_position_embeddings", max_positions)
    norm = norm or NormSpec(eps=fields.number("rms_norm_eps", eps))
    rope = rope or usual_rope(fields, head_dim, max_positions, theta)
    mlps = [one or _mlp(fields, activation, gated_mlp, mlp_bias) for one in experts or [None] * len(windows)]
    plain = SelfAttentionSpec(
        *(heads, kv_heads, head_dim, attention_scale or (query_scalar or head_dim) ** -0.5, rope),
        softcap=attention_softcap,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=norm if qk_norm else None,
        norms_rows=qk_norm == "row",
    )
    attentions = _attentions(plain, windows, ropes or [rope] * len(windows))
    pairs = zip(attentions, mlps, strict=True)
    return DecoderSpec(
        architecture=fields.raw["architectures"][0],
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        layers=tuple(_layer(pair, norms, residual_scale, parallel) for pair in pairs),
        norm=norm,
        default_length=rope.default_length(positions),
        longest_length=rope.longest_length(positions),
        tie_word_embeddings=fields.flag("tie_word_embeddings", tied),
        dtype=declared_dtype(fields.raw),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
    )


def whole_heads(fields: Fields) -> int:
    """Return the width of heads that divide the hidden size equally. Refuse any other `head_dim`."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise StartupError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.",
            "Repair one of them.",
        )
    fields.check_value("head_dim", hidden // heads)
    return hidden // heads


def with_learned_positions(spec: DecoderSpec, length: int, first: int = 0) -> DecoderSpec:
    """Return the model with a learned table of `length` positions instead of rotary embedding.

    `first`: row of position 0.
    """
    plain = spec.with_sublayers(lambda one: replace(one, rope=None) if isinstance(one, SelfAttentionSpec) else one)
    table = PositionTable(length + first, first)
    return replace(plain, positions=table, default_length=length, longest_length=length)


def _mlp(fields: Fields, activation: str | None, gated: bool, bias: bool) -> GatedMLPSpec | MLPSpec:
    """Return the MLP. `activation`: None for that of `hidden_act`, which must be given without a gate."""
    assert gated or activation is not None, "an MLP without a gate has no usual activation"
    activation = activation or activation_name(fields, "hidden_act", "silu")
    kind = GatedMLPSpec if gated else MLPSpec
    return kind(fields.count("intermediate_size"), activation, bias)


def _attentions(
    plain: SelfAttentionSpec, windows: Sequence[int | None], ropes: Sequence[RopeSpec | None]
) -> list[SelfAttentionSpec]:
    return [replace(plain, window=window, rope=rope) for window, rope in zip(windows, ropes, strict=True)]


@cache
def _layer(sublayers: tuple[SublayerSpec, ...], norms: Norms, scale: float, parallel: bool) -> LayerSpec:
    branches = [BranchSpec(one, *names, scale) for one, names in zip(sublayers, norms, strict=True)]
    return LayerSpec(tuple(branches), (len(branches),) if parallel else ())


def with_first(
    spec: DecoderSpec, sublayer: SublayerSpec, is_replaced: Sequence[bool], norms: Sequence[str] | None = None
) -> DecoderSpec:
    """Return the model with `sublayer` in place of the first sublayer of some layers.

    `norms`: norms before the sublayers of these layers, which then have none after; None: the norms of other layers.
    """
    layers = []
    for layer, replaced in zip(spec.layers, is_replaced, strict=True):
        first, *others = layer.branches
        branches = [replace(first, sublayer=sublayer), *others]
        if norms is not None:
            pairs = zip(branches, norms, strict=True)
            branches = [replace(branch, norm=norm, post_norm=None) for branch, norm in pairs]
        layers.append(replace(layer, branches=tuple(branches)) if replaced else layer)
    return replace(spec, layers=tuple(layers))


def _head_counts(fields: Fields, default: int | None) -> tuple[int, int]:
    """Return the numbers of query heads and key-value heads. `default`: of key-value heads; None: equal to query
    heads."""
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default or heads)
    if heads % kv_heads:
        raise StartupError(
            f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly.",
            "Repair num_attention_heads or num_key_value_heads.",
        )
    return heads, kv_heads


def usual_rope(
    fields: Fields,
    head_dim: int | None,
    max_positions: int,
    theta: float | None = None,
    share: float | None = None,
    *,
    interleaved: bool = False,
) -> RopeSpec:
    """Return the rotary settings from the keys that families share. The arguments are the family's defaults.

    `share`: the part of each head that is rotated; None: the family rotates whole heads.
    """
    table, trained = rope_table(fields, theta), fields.raw.get("original_max_position_embeddings")
    positions, width = fields.count("max_position_embeddings", max_positions), head_width(fields, head_dim)
    if share is not None:
        outer = fields.number("partial_rotary_factor", share)
        share = positive_number("partial_rotary_factor", table.get("partial_rotary_factor"), outer)
    return replace(rope_spec(table, width, positions, original=trained, share=share), interleaved=interleaved)


def expert_counts(
    fields: Fields, default: int, chosen_default: int, chosen_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Return the experts of a layer, and the experts per token.

    Versions of transformers have different names for the number of experts; if several are given, they must agree.
    """
    counts = {
        key: fields.count(key, default, most=_MOST_EXPERTS) for key in _EXPERT_KEYS if fields.raw.get(key) is not None
    }
    if len(set(counts.values())) > 1:
        raise StartupError(f"config.json: {' and '.join(counts)} differ.", "Repair one of them.")
    experts, chosen = next(iter(counts.values()), default), fields.count(chosen_key, chosen_default)
    if chosen > experts:
        raise StartupError(
            f"config.json: a token cannot have {chosen} of {experts} experts.",
            f"Repair {' or '.join([chosen_key, *(counts or _EXPERT_KEYS[:1])])}.",
        )
    return experts, chosen


def head_width(fields: Fields, default: int | None) -> int:
    """Return the elements of one head."""
    heads = fields.count("num_attention_heads")
    return fields.count("head_dim", default or max(1, fields.count("hidden_size") // heads))


def activation_name(fields: Fields, key: str, default: str, *, gated: bool = True) -> str:
    """Return our name of an activation. `gated`: whether the MLP has a gate."""
    return fields.choice(key, default, _ACTIVATIONS if gated else _PLAIN_ACTIVATIONS)


def declared_dtype(config: dict[str, Any]) -> str | None:
    """Return the declared dtype of the checkpoint's weights, or None if there is none."""
    value = config.get("dtype")
    value = config.get("torch_dtype") if value is None else value
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise unsupported("torch_dtype", value, f"Supported: {', '.join(ITEM_BYTES)}.")
    return name


def layer_windows(fields: Fields, window: int | None, first_sliding: int) -> tuple[int | None, ...]:
    """Return one window per layer: from `layer_types` if given, otherwise sliding from layer `first_sliding` on."""
    layers = fields.layers()
    kinds = layer_kinds(fields)
    if kinds is None:
        return tuple(window if index >= first_sliding else None for index in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(fields: Fields, windowed: str = "sliding_attention") -> list[str] | None:
    """Return the checked `layer_types`, or None if the config has none. `windowed`: the kind besides full attention."""
    layers = fields.layers()
    kinds = fields.raw.get("layer_types")
    known = ("full_attention", windowed)
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds)
    ):
        raise unsupported("layer_types", kinds, f"One of {' or '.join(known)} for each of the {layers} layers.")
    return kinds


def sliding_windows(fields: Fields, kinds: list[str], default: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer of `kinds`: `sliding_window`, or the family's `default`, if the layer slides."""
    if "sliding_attention" not in kinds:
        return (None,) * len(kinds)
    if fields.raw.get("sliding_window", default) is None:
        raise unsupported("sliding_window", None, "Its layers of sliding_attention need a length.")
    window = fields.count("sliding_window", default)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
