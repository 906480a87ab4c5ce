"""Gemma 4, the text model: two kinds of attention that differ in heads and rotation, and inputs of each layer.

Torch-free. Keys and values of the last layers are those of earlier ones, full attention may use its keys as values, and
each layer scales its result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.layer_input_spec import LayerInputSpec, LayerInputTable
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    BEFORE_AND_AFTER,
    activation_name,
    decoder_spec,
    expert_counts,
    head_width,
    layer_kinds,
    sliding_windows,
)
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported, wrong
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _FULL, _SLIDING = 131_072, "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
_INPUT = "model.layers.*.per_layer_input"
_MODULES = {
    "model.layers.*.per_layer_input_gate": f"{_INPUT}.gate_proj",
    "model.layers.*.per_layer_projection": f"{_INPUT}.down_proj",
    "model.layers.*.router": "model.layers.*.moe.router",
    "model.layers.*.experts": "model.layers.*.moe.experts",
    "model.layers.*.pre_feedforward_layernorm_2": "model.layers.*.moe.norm",
}
_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm", "v_norm")
_OF_LAYER = {"head_dim", "num_key_value_heads"}  # settings that a layer may have of its own
_DIGITS = 9  # of the longest number of a layer that is read
# Settings that change the computation in ways that are not served.
_FIXED: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": ("vision",)}


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of the keys of one layer."""

    width: int
    kv_heads: int


def describe_gemma4(fields: Fields) -> DecoderSpec:
    """Describe Gemma 4. Tokens of images may see later tokens, which text does not."""
    return _gemma4(fields, _POSITIONS, 512, fields.count("hidden_size_per_layer_input", 256, least=0))


def describe_gemma4_unified(fields: Fields) -> DecoderSpec:
    """Describe Gemma 4 without towers, whose layers have no inputs of their own."""
    fields.check_value("hidden_size_per_layer_input", 0)
    fields.check_value("enable_moe_block", False)
    return _gemma4(fields, 2 * _POSITIONS, 1024, 0)


def _gemma4(fields: Fields, positions: int, window: int, width: int) -> DecoderSpec:
    """Return the decoder that both classes share. `positions` and `window` are defaults; `width`: of layers' inputs."""
    fields.serve_only(_FIXED)
    kinds = _kinds(fields)
    windows, bias = sliding_windows(fields, kinds, window), fields.flag("attention_bias", False)
    softcap, activation = fields.number_or_none("final_logit_softcapping", None), _activation(fields)
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    mixture = _mixture(fields, norm) if fields.flag("enable_moe_block", False) else None
    spec = decoder_spec(
        fields,
        kv_heads=4,
        head_dim=256,
        max_positions=positions,
        windows=windows,
        rope=_rope_of(fields, kinds[0], head_width(fields, 256), positions),
        attention_scale=1.0,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        activation=activation,
        norm=norm,
        norms=BEFORE_AND_AFTER,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        logit_softcap=softcap,
        tied=True,
    )
    sources, shares_projection = _sources(fields, kinds), fields.flag("attention_k_eq_v", False)
    is_wide = fields.flag("use_double_wide_mlp", False)
    layers, rest = [], []
    for index, (kind, heads) in enumerate(zip(kinds, _heads(fields, kinds), strict=True)):
        attention, mlp = (branch.sublayer for branch in spec.layers[index].branches)
        assert isinstance(attention, SelfAttentionSpec) and isinstance(mlp, GatedMLPSpec)
        attention = replace(
            attention,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.width,
            rope=_rope_of(fields, kind, heads.width, positions),
            of_layer=sources[index],
            norms_values=True,
            keys_are_values=shares_projection and kind == _FULL,
        )
        if sources[index] is not None:
            rest += [f"model.layers.{index}.self_attn.{module}" for module in _KEYS_AND_VALUES]
            mlp = replace(mlp, intermediate_size=mlp.intermediate_size * (2 if is_wide else 1))
        layers.append(_layer(spec.layers[index], attention, mlp, mixture, width))
    table = None if width == 0 else LayerInputTable(_rows_of_table(fields), width, spec.norm)
    return replace(
        spec, layers=tuple(layers), layer_inputs=table, names=TensorNames(modules=_MODULES, ignored=tuple(rest))
    )


def _layer(
    plain: LayerSpec, attention: SelfAttentionSpec, mlp: GatedMLPSpec, mixture: ExpertsSpec | None, width: int
) -> LayerSpec:
    """Return a layer with these sublayers and, unless `width` is 0, an input of its own of this width.

    The experts read the same rows as the MLP, and the sum of both results, each of which is normed, is normed.
    """
    branches = [replace(branch, sublayer=one) for branch, one in zip(plain.branches, (attention, mlp), strict=True)]
    lengths: tuple[int, ...] = (1, 1)
    sums: tuple[str | None, ...] = (None, None)
    if mixture is not None:
        after, lengths = branches[1].post_norm, (1, 2)
        branches[1] = replace(branches[1], post_norm=f"{after}_1")
        branches.append(BranchSpec(mixture, None, f"{after}_2"))
        sums = (None, after)
    if width:
        added = LayerInputSpec(width, mlp.activation)
        branches.append(BranchSpec(added, None, "post_per_layer_input_norm"))
        lengths, sums = (*lengths, 1), (*sums, None)
    return replace(plain, branches=tuple(branches), lengths=lengths, sum_norms=sums, scalar="layer_scalar")


def _mixture(fields: Fields, norm: NormSpec) -> ExpertsSpec:
    """Return the experts, whose router norms its input by itself and has a factor for each expert's weight."""
    experts, top_k = expert_counts(fields, 128, 8, "top_k_experts")
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if fields.raw.get(key) is None:
            raise unsupported(key, None, "It must be given with enable_moe_block.")
    router = RouterSpec(
        top_k,
        normalised=True,
        name="router.proj",
        module="router",
        input_scale="router.scale",
        input_epsilon=norm.eps,
        expert_scale="router.per_expert_scale",
    )
    width = fields.count("moe_intermediate_size")
    return ExpertsSpec(experts, width, router, "gelu_tanh", norm=norm, module="moe")


def _activation(fields: Fields) -> str:
    found = activation_name(fields, "hidden_activation", "gelu_pytorch_tanh")
    if found != "gelu_tanh":
        raise unsupported("hidden_activation", fields.raw.get("hidden_activation"), "Gemma 4 has gelu_pytorch_tanh.")
    return found


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer. As in transformers the last has full attention, whatever the config has."""
    found = layer_kinds(fields)
    if found is None:
        found = [_SLIDING if (index + 1) % 6 else _FULL for index in range(fields.layers())]
    return [*found[:-1], _FULL]


def _sources(fields: Fields, kinds: Sequence[str]) -> list[int | None]:
    """Return the layer whose keys and values each layer reads: itself as None, or the last of its kind that has own."""
    shared = fields.count("num_kv_shared_layers", 0, least=0)
    own = kinds[: len(kinds) - shared]
    if shared >= len(kinds) or set(own) != set(kinds):
        raise unsupported(
            "num_kv_shared_layers", shared, "Each kind of layer_types needs a layer with keys and values of its own."
        )
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(own)}
    return [None] * len(own) + [last[kind] for kind in kinds[len(own) :]]


def _heads(fields: Fields, kinds: Sequence[str]) -> list[_Heads]:
    """Return the heads of each layer: from `per_layer_config`, or from the settings of layers with full attention."""
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads", 4)
    usual = _Heads(head_width(fields, 256), kv_heads)
    full = _Heads(fields.count("global_head_dim", 512), kv_heads)
    if fields.flag("attention_k_eq_v", False) and fields.raw.get("num_global_key_value_heads") is not None:
        full = replace(full, kv_heads=fields.count("num_global_key_value_heads"))
    found = [full if kind == _FULL else usual for kind in kinds]
    if fields.raw.get("per_layer_config") is not None:
        found = _given_heads(fields, len(kinds), usual)
    if any(heads % one.kv_heads for one in found):
        counts = sorted({one.kv_heads for one in found})
        raise StartupError(
            f"config.json: {heads} attention heads cannot share {counts} key-value heads evenly.",
            "Repair num_attention_heads, num_key_value_heads or num_global_key_value_heads.",
        )
    return found


def _given_heads(fields: Fields, layers: int, usual: _Heads) -> list[_Heads]:
    """Return the heads of each layer by `per_layer_config`: its own, or the `usual` ones where it is not listed.

    Keys are numbers of layers. transformers writes all with as many digits as the last one has: "05" and "29".
    """
    own: dict[int, _Heads] = {}
    for key, settings in fields.table("per_layer_config").items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= _DIGITS
        if not is_number or int(key) >= layers or int(key) in own:
            raise unsupported(
                f"per_layer_config of layer {key}", settings, f"Its keys are numbers of the {layers} layers, each once."
            )
        if not isinstance(settings, dict) or settings.keys() - _OF_LAYER:
            raise unsupported(
                f"per_layer_config of layer {key}",
                settings,
                f"A layer has no other settings than {sorted(_OF_LAYER)}.",
            )
        inner = Fields(settings)
        width, kv_heads = inner.count("head_dim", usual.width), inner.count("num_key_value_heads", usual.kv_heads)
        own[int(key)] = _Heads(width, kv_heads)
    return [own.get(index, usual) for index in range(layers)]


def _rope_of(fields: Fields, kind: str, head_dim: int, positions: int) -> RopeSpec:
    """Return the rotary settings of layers of `kind`, whose heads have `head_dim` elements."""
    for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
        fields.check_value(key)
    tables = fields.table("rope_parameters") or _ROPES
    if not isinstance(tables.get(kind), dict):
        raise unsupported("rope_parameters", tables, f"Gemma 4 has a table for {kind}.")
    return rope_spec(tables[kind], head_dim, fields.count("max_position_embeddings", positions))


def _rows_of_table(fields: Fields) -> int:
    """Return the rows of the table of layers' inputs, which must have one for each token id."""
    vocab, rows = fields.count("vocab_size"), fields.count("vocab_size_per_layer_input", 262_144)
    if rows < vocab:
        raise wrong("vocab_size_per_layer_input", f"at least vocab_size {vocab}", rows)
    return rows


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Gemma 4's settings. The file has the heads of full attention under the usual keys."""
    tensors, layers = settings.model.tensors, config["num_hidden_layers"]
    kinds, width = settings.layer_kinds(layers), settings.count(".attention.key_length_swa")
    for key, needed in (("attention.value_length_swa", width), ("rope.dimension_count_swa", width)):
        if settings.count(f".{key}", needed) != needed:
            raise StartupError(
                f"{settings.model.path}: {key} is not attention.key_length_swa {width}.", "Use another file."
            )
    kv_heads = _of_layers(settings, ".attention.head_count_kv", layers)
    widths = _of_layers(settings, ".feed_forward_length", layers)
    table, first = tensors.get("per_layer_token_embd.weight"), kinds.index(_FULL)
    return {
        "head_dim": width,
        "per_layer_config": {
            str(index): {"head_dim": config["head_dim"] if kind == _FULL else width, "num_key_value_heads": count}
            for index, (kind, count) in enumerate(zip(kinds, kv_heads, strict=True))
        },
        "layer_types": kinds,
        "sliding_window": settings.count(".attention.sliding_window"),
        "num_kv_shared_layers": settings.count(".attention.shared_kv_layers", 0),
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": settings.count(".embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.entry.shape[0],
        "final_logit_softcapping": settings.number(".final_logit_softcapping", 0.0) or None,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {"rope_type": "proportional", "rope_theta": config["rope_theta"], **_share(settings, config)},
            _SLIDING: {"rope_type": "default", "rope_theta": settings.number(".rope.freq_base_swa", 10_000.0)},
        },
    }


def _of_layers(settings: GGUFSettings, key: str, layers: int) -> list[int]:
    """Return an integer of each layer, which the file has as a list or once for all."""
    try:
        return [settings.count(key)] * layers
    except StartupError:
        return [int(one) for one in settings.numbers(key, layers)]


def _share(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, float]:
    """Return the part of each head that full attention rotates: frequencies of the rest are divided by 1e30."""
    factors = (config["rope_scaling"] or {}).get("short_factor") or []
    rotated = sum(factor == 1.0 for factor in factors)
    if (
        not rotated
        or len(factors) != config["head_dim"] // 2
        or sum(factor > 1e20 for factor in factors) < len(factors[rotated:])
    ):
        raise StartupError(
            f"{settings.model.path}: tensor 'rope_freqs.weight' is not that of Gemma 4.",
            "Use a file that llama.cpp's converter wrote.",
        )
    return {"partial_rotary_factor": rotated / len(factors)}


GGUF_GEMMA4 = GGUFFamily(
    *("gemma4", "Gemma4ForCausalLM", _own, "gemma4_text"),
    layers_differ=True,
    others_on_top={
        "per_layer_token_embd": LayerInputTable.table,
        "per_layer_model_proj": LayerInputTable.projection,
        "per_layer_proj_norm": LayerInputTable.projection_norm,
    },
    others=(
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
    ),
)


FAMILIES: dict[str, Describe] = {
    "Gemma4ForCausalLM": describe_gemma4,
    "Gemma4UnifiedForCausalLM": describe_gemma4_unified,
}
GGUF_FAMILIES = (GGUF_GEMMA4,)
