"""OLMo 1, 2 and 3, and the MoE models OLMoE and FlexOlmo. Torch-free.

OLMo 1 has LayerNorms without weights, and limits the size of queries, keys and values. The others norm q and k over all
heads. OLMo 2 and 3 and FlexOlmo only norm the results of attention and MLP. OLMoE norms the inputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import (
    BEFORE,
    Norms,
    activation_name,
    decoder_spec,
    expert_counts,
    head_width,
    layer_kinds,
    sliding_windows,
)
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS, _THETA = 2048, 500_000.0
_AFTER: Norms = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
_CLAMP = ".attention.clamp_kqv"  # setting of GGUF files


def describe_olmo(fields: Fields) -> DecoderSpec:
    bias, limit = fields.flag("attention_bias", False), fields.number_or_none("clip_qkv", None)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec("layer", 1e-5, weight=False),
    )
    return spec.with_sublayers(lambda one: replace(one, clip_qkv=limit) if isinstance(one, SelfAttentionSpec) else one)


def _own_olmo(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {"clip_qkv": settings.number(_CLAMP) if settings.has(_CLAMP) else None}


GGUF_OLMO = GGUFFamily("olmo", "OlmoForCausalLM", _own_olmo, pairs_neighbours=True)


def describe_olmo2(fields: Fields) -> DecoderSpec:
    return _olmo_spec(fields, (None,) * fields.layers())


def describe_olmo3(fields: Fields) -> DecoderSpec:
    """Describe OLMo 3, with windows in three of four layers, and another rotary table for these."""
    kinds = layer_kinds(fields)
    if kinds is None:
        kinds = ["sliding_attention" if (index + 1) % 4 else "full_attention" for index in range(fields.layers())]
    head_dim, positions = head_width(fields, None), fields.count("max_position_embeddings", _POSITIONS)
    of_kind = {kind: rope_spec(table, head_dim, positions) for kind, table in _rope_tables(fields).items()}
    ropes = [of_kind[kind] for kind in kinds]
    return _olmo_spec(fields, sliding_windows(fields, kinds, 4096), of_kind["full_attention"], ropes)


def _rope_tables(fields: Fields) -> dict[str, dict[str, Any]]:
    """Return the rotary settings of full and of sliding layers. An old config's `rope_scaling` is only for full
    layers."""
    tables, scaling, outer = fields.table("rope_parameters"), fields.table("rope_scaling"), fields.raw.get("rope_theta")
    kinds = ("full_attention", "sliding_attention")
    if any(key not in kinds for key in tables):
        raise unsupported("rope_parameters", tables, f"OLMo 3 has one table each for {' and '.join(kinds)}.")
    if outer not in (None, _THETA):  # transformers gives it to full layers only
        raise unsupported("rope_theta", outer, "Write it into the tables of rope_parameters.")
    inner = Fields(tables)
    full, sliding = ({"rope_theta": _THETA, **inner.table(kind)} for kind in kinds)
    return {"full_attention": full | scaling, "sliding_attention": sliding}


def _olmo_spec(
    fields: Fields,
    windows: tuple[int | None, ...],
    rope: RopeSpec | None = None,
    ropes: Sequence[RopeSpec] | None = None,
) -> DecoderSpec:
    """Return the description that OLMo 2 and 3 share."""
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=ropes,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        norms=_AFTER,
        eps=1e-5,
    )


def _own_olmo2(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return OLMo's settings. The converter has one name for OLMo 2 and OLMo 3, which has windows."""
    settings.check_whole_heads(config["head_dim"])
    own: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}
    window = settings.count(".attention.sliding_window", 0)
    if not window:
        return own
    theta = config["rope_theta"]
    full, sliding = {"rope_theta": theta}, {"rope_theta": settings.number(".rope.freq_base_swa", theta)}
    return own | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": settings.layer_kinds(config["num_hidden_layers"], 4),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": full | (config["rope_scaling"] or {}),
            "sliding_attention": sliding,
        },
    }


GGUF_OLMO2 = GGUFFamily("olmo2", "Olmo2ForCausalLM", _own_olmo2, others=("Olmo3ForCausalLM",))


def describe_olmoe(fields: Fields) -> DecoderSpec:
    return _moe_spec(fields, (64, 8), 2048, BEFORE, eps=1e-5)


def describe_flex_olmo(fields: Fields) -> DecoderSpec:
    return _moe_spec(fields, (7, 5), 11008, _AFTER, theta=_THETA)


def _moe_spec(
    fields: Fields, counts: tuple[int, int], width: int, norms: Norms, *, eps: float = 1e-6, theta: float | None = None
) -> DecoderSpec:
    """Return the description that MoE models share. `counts` (experts, experts per token), `width`, `eps` and `theta`
    are the family's defaults."""
    bias = fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, *counts)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=fields.flag("norm_topk_prob", False))
    mixture = ExpertsSpec(experts, fields.count("intermediate_size", width), router, activation)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=4096,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        experts=(mixture,) * fields.layers(),
        activation=activation,
        norms=norms,
        eps=eps,
        theta=theta,
    )


def _own_olmoe(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    clamp = {"clip_qkv": settings.number(_CLAMP)} if settings.has(_CLAMP) else {}
    return {"norm_topk_prob": False, **clamp}


GGUF_OLMOE = GGUFFamily("olmoe", "OlmoeForCausalLM", _own_olmoe, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "FlexOlmoForCausalLM": describe_flex_olmo,
    "Olmo2ForCausalLM": describe_olmo2,
    "Olmo3ForCausalLM": describe_olmo3,
    "OlmoForCausalLM": describe_olmo,
    "OlmoeForCausalLM": describe_olmoe,
}
GGUF_FAMILIES = (
    GGUF_OLMO2,
    GGUF_OLMOE,
    GGUF_OLMO,
)
