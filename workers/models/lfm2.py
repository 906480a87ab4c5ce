"""LFM2 and LFM3: gated short convolutions in place of attention in most layers. Torch-free.

LFM2's larger models have experts. LFM3 norms the results of sublayers, gates the heads of attention, and has windows in
some layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    decoder_spec,
    expert_counts,
    head_width,
    sliding_windows,
    usual_rope,
    with_first,
)
from oarlock.workers.models.hf_fields import MOST, Describe, Fields, unsupported, wrong
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _THETA, _EPSILON, _CONVOLUTION = 128_000, 1_000_000.0, 1e-5, "conv"
_LONGEST_KERNEL = 64  # tokens; known models have 3 or 7
_MLP = "model.layers.*.feed_forward"
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NAMES = TensorNames(
    modules={
        "model.embedding_norm": "model.norm",
        "model.layers.*.self_attn.out_proj": "model.layers.*.self_attn.o_proj",
        "model.layers.*.self_attn.q_layernorm": "model.layers.*.self_attn.q_norm",
        "model.layers.*.self_attn.k_layernorm": "model.layers.*.self_attn.k_norm",
        "model.layers.*.self_attn.g_proj": "model.layers.*.self_attn.gate_proj",
        _MLP: "model.layers.*.mlp",
        **{f"{_MLP}.{theirs}": f"model.layers.*.mlp.{ours}" for theirs, ours in _PARTS.items()},
        **{f"{_MLP}.experts.*.{theirs}": f"model.layers.*.mlp.experts.*.{ours}" for theirs, ours in _PARTS.items()},
    }
)
# Settings of the authors' code that transformers does not have.
_FIXED: dict[str, tuple[Any, ...]] = {"block_use_swiglu": (True,), "use_pos_enc": (True,), "conv_use_bias": (False,)}


def describe_lfm2(fields: Fields) -> DecoderSpec:
    """Describe LFM2. The config has the width of an MLP with two matrices, from which that with three is derived."""
    fields.serve_only(_FIXED)
    width = fields.count("block_ff_dim" if fields.raw.get("block_ff_dim") is not None else "intermediate_size", 12288)
    if fields.flag("block_auto_adjust_ff_dim", True):
        width, unit = 2 * width // 3, fields.count("block_multiple_of", 256)
        if fields.raw.get("block_ffn_dim_multiplier", 1.0) is not None:
            width = int(fields.number("block_ffn_dim_multiplier", 1.0) * width)
            width = -(-width // unit) * unit
    if not 1 <= width <= MOST:
        raise wrong("intermediate_size", "a width of at least one after the adjustments of block_*", width)
    kinds = _layer_kinds(fields, _attention_layers(fields))
    return _lfm2(fields, kinds, [GatedMLPSpec(width)] * len(kinds))


def describe_lfm2_moe(fields: Fields) -> DecoderSpec:
    """Describe LFM2 with experts, which are chosen by sigmoids with a correction. The first layers have none."""
    fields.serve_only(_FIXED)
    layers = fields.layers()
    experts, top_k = expert_counts(fields, 32, 4)
    router = RouterSpec(
        top_k,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        added_to_sum=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0),
        correction="expert_bias" if fields.flag("use_expert_bias", True) else None,
    )
    mixture = ExpertsSpec(experts, fields.count("moe_intermediate_size", 1792), router)
    dense = min(layers, fields.count("num_dense_layers", 2, least=0))
    mlp = GatedMLPSpec(fields.count("intermediate_size", 7168))
    return _lfm2(fields, _layer_kinds(fields, None), [mlp] * dense + [mixture] * (layers - dense))


def describe_lfm3(fields: Fields) -> DecoderSpec:
    """Describe LFM3, with a rotary table for each kind of attention."""
    default = [
        "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index > 0 else _CONVOLUTION
        for index in range(fields.layers())
    ]
    kinds = _layer_kinds(fields, default, ("sliding_attention", "full_attention"))
    windows, positions = sliding_windows(fields, kinds, 256), fields.count("max_position_embeddings", _POSITIONS)
    tables = fields.table("rope_parameters") or {
        "sliding_attention": {"rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": _THETA, "partial_rotary_factor": 0.5},
    }
    for key in ("rope_theta", "rope_scaling"):
        fields.check_value(key)
    ropes = {kind: _rope_of(tables, kind, head_width(fields, 128), positions) for kind in kinds if kind != _CONVOLUTION}
    after = ("post_operator_norm", "post_ffn_norm") if fields.flag("use_sandwich_norm", True) else (None, None)
    mlps = [GatedMLPSpec(fields.count("intermediate_size", 7680))] * len(kinds)
    of_layers = [ropes.get(kind) for kind in kinds]
    spec = _decoder(fields, kinds, mlps, 4, 128, windows, of_layers, after, fields.flag("attention_bias", False))
    if not fields.flag("use_attention_gate", True):
        return spec
    return spec.with_sublayers(
        lambda one: replace(one, output_gate=True, gate_per_head=True) if isinstance(one, SelfAttentionSpec) else one
    )


def _lfm2(fields: Fields, kinds: list[str], mlps: Sequence[ExpertsSpec | GatedMLPSpec]) -> DecoderSpec:
    """Return the decoder that LFM2's classes share. Their configs may call a tied head `tie_embedding`."""
    rope = usual_rope(fields, None, _POSITIONS, _THETA)
    spec = _decoder(fields, kinds, mlps, 8, None, (None,) * len(kinds), [rope] * len(kinds), (None, None), False)
    return replace(spec, tie_word_embeddings=fields.flag("tie_embedding", spec.tie_word_embeddings))


def _decoder(
    fields: Fields,
    kinds: list[str],
    mlps: Sequence[ExpertsSpec | GatedMLPSpec],
    kv_heads: int,
    head_dim: int | None,
    windows: tuple[int | None, ...],
    ropes: Sequence[RopeSpec | None],
    after: tuple[str | None, str | None],
    bias: bool,
) -> DecoderSpec:
    """Return the decoder whose layers of `kinds` have attention or a convolution. `after`: norms of results."""
    hidden = fields.count("hidden_size")
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        fields.check_value(key, hidden)
    rope = next((one for one in ropes if one is not None), None)
    if rope is None:
        raise unsupported("layer_types", kinds, "A model must have attention in at least one layer.")
    spec = decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=mlps,
        norm=NormSpec(eps=_epsilon(fields)),
        norms=(("operator_norm", after[0]), ("ffn_norm", after[1])),
        tied=True,
    )
    kernel_size = fields.count("conv_L_cache", 7 if "sliding_attention" in kinds else 3, least=2, most=_LONGEST_KERNEL)
    convolution = ShortConvolutionSpec(hidden, kernel_size, fields.flag("conv_bias", False))
    return replace(with_first(spec, convolution, [kind == _CONVOLUTION for kind in kinds]), names=_NAMES)


def _layer_kinds(
    fields: Fields, default: list[str] | None, attention: tuple[str, ...] = ("full_attention",)
) -> list[str]:
    """Return the kind of each layer: `layer_types`, or `default` if there is one."""
    layers, known = fields.layers(), (*attention, _CONVOLUTION)
    kinds = fields.raw.get("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise unsupported("layer_types", kinds, f"One of {' or '.join(known)} for each of the {layers} layers.")
    return kinds


def _attention_layers(fields: Fields) -> list[str]:
    """Return the kind of each layer by `full_attn_idxs`, the numbers of the layers with attention; None: all."""
    layers, given = fields.layers(), fields.raw.get("full_attn_idxs")
    if given is not None and (not isinstance(given, list) or any(type(index) is not int for index in given)):
        raise unsupported("full_attn_idxs", given, "It must be a list of numbers of layers.")
    return ["full_attention" if given is None or index in given else _CONVOLUTION for index in range(layers)]


def _epsilon(fields: Fields) -> float:
    """Return the epsilon of norms, which LFM3's config may have under its usual name."""
    usual, own = fields.raw.get("rms_norm_eps"), fields.raw.get("norm_eps")
    if usual is not None and own is not None and usual != own:
        raise StartupError("config.json: norm_eps and rms_norm_eps differ.", "Repair one of them.")
    return fields.number("norm_eps" if own is not None else "rms_norm_eps", _EPSILON)


def _rope_of(tables: dict[str, Any], kind: str, head_dim: int, positions: int) -> RopeSpec:
    """Return the rotary settings of the layers of `kind`."""
    if not isinstance(tables.get(kind), dict):
        raise unsupported("rope_parameters", tables, f"It must have a table for {kind}.")
    return rope_spec({"rope_theta": _THETA, **tables[kind]}, head_dim, positions)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return LFM2's settings. Layers with a convolution have no key-value heads."""
    settings.check_whole_heads(config["head_dim"])
    heads = settings.numbers(".attention.head_count_kv", config["num_hidden_layers"])
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if count else _CONVOLUTION for count in heads],
        "conv_L_cache": settings.count(".shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.in_proj.bias") for name in settings.model.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _own_moe(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_sigmoid_router()
    return _own(settings, config) | {
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "num_dense_layers": settings.count(".leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in settings.model.tensors),
        "norm_topk_prob": settings.flag(".expert_weights_norm", True),
        "routed_scaling_factor": settings.number(".expert_weights_scale", 1.0),
    }


_NORM_NAME = {"token_embd_norm": "model.norm"}
GGUF_LFM2 = GGUFFamily(
    *("lfm2", "Lfm2ForCausalLM", _own),
    layers_differ=True,
    others_on_top=_NORM_NAME,
    others=("Lfm2VlForConditionalGeneration",),
)
GGUF_LFM2_MOE = GGUFFamily(
    *("lfm2moe", "Lfm2MoeForCausalLM", _own_moe, "lfm2_moe"),
    has_experts=True,
    layers_differ=True,
    others_on_top=_NORM_NAME,
)


FAMILIES: dict[str, Describe] = {
    "Lfm2ForCausalLM": describe_lfm2,
    "Lfm2MoeForCausalLM": describe_lfm2_moe,
    "Lfm3ForCausalLM": describe_lfm3,
}
GGUF_FAMILIES = (GGUF_LFM2, GGUF_LFM2_MOE)
