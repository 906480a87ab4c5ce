"""MiMo-V2-Flash: keys are wider than values, and layers with a window have twice the key-value heads, and sinks.

Torch-free.
"""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width, layer_kinds
from oarlock.workers.models.hf_experts import grouped_router, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.laguna import rope_by_kind

_POSITIONS, _HEAD, _VALUE, _SHARE, _WINDOW = 131_072, 192, 128, 0.334, 129
_ROPES: dict[str, dict[str, Any]] = {"full_attention": {"rope_theta": 5e6}, "sliding_attention": {"rope_theta": 1e4}}
# Settings of the authors' code that transformers does not read.
_FIXED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "n_shared_experts": (0,),
    "add_swa_attention_sink_bias": (True,), "add_full_attention_sink_bias": (False,),
}  # fmt: skip


def describe_mimo_v2_flash(fields: Fields) -> DecoderSpec:
    """Describe MiMo-V2-Flash. Layers that predict tokens further ahead (`mtp`) are not served."""
    fields.serve_only(_FIXED)
    _check_authors_settings(fields)
    kinds, is_sparse = _kinds(fields), sparse_layers(fields, 1)
    fields.check_value("moe_layer_freq", [int(one) for one in is_sparse])
    ropes = _ropes(fields, kinds)
    activation = activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 256, 8)
    router = grouped_router(fields, experts, top_k)
    mixture = ExpertsSpec(experts, fields.count("moe_intermediate_size", 2048), router, activation)
    window = _window(fields)
    spec = decoder_spec(
        fields,
        kv_heads=4,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        rope=ropes[0],
        ropes=ropes,
        qkv_bias=fields.flag("attention_bias", False),
        activation=activation,
        experts=[mixture if one else None for one in is_sparse],
        eps=1e-5,
    )
    width = fields.count("v_head_dim", _VALUE)
    scale = fields.number_or_none("attention_value_scale", 0.707) or 1.0
    layers = [_with_values(layer, width, scale) for layer in spec.layers]
    return replace(spec, layers=tuple(layers), names=TensorNames(modules=_SINKS, ignored=("model.mtp",)))


_SINKS = {"model.layers.*.self_attn.attention_sink_bias": "model.layers.*.self_attn.sinks"}


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of attention of each layer. Without `layer_types` the first and every sixth layer have full
    attention."""
    found = layer_kinds(fields)
    if found is None:
        is_full = [index == 0 or (index + 1) % 6 == 0 for index in range(fields.layers())]
        found = ["full_attention" if one else "sliding_attention" for one in is_full]
    pattern = fields.raw.get("hybrid_layer_pattern")
    if pattern is not None and pattern != [int(kind == "sliding_attention") for kind in found]:
        raise unsupported("hybrid_layer_pattern", pattern, "It must agree with the layers that transformers assumes.")
    return found


def _ropes(fields: Fields, kinds: list[str]) -> list[RopeSpec]:
    """Return the rotary settings of each layer, from a table for each kind, or transformers' tables if there are none.

    The authors' config has no tables, but keys with the same settings, which must agree.
    """
    plain = fields.derived({key: value for key, value in fields.raw.items() if key != "rope_theta"})
    width = head_width(fields, _HEAD)
    ropes = rope_by_kind(plain, kinds, width, _ROPES, _SHARE)
    share = fields.number_or_none("partial_rotary_factor", None)
    for kind, rope in dict(zip(kinds, ropes, strict=True)).items():
        fields.check_value("rope_theta" if kind == "full_attention" else "swa_rope_theta", rope.theta)
        if share is not None and int(width * share) != rope.rotary_dim:
            raise unsupported("partial_rotary_factor", share, "It must agree with rope_parameters.")
    return ropes


def _window(fields: Fields) -> int:
    """Return the tokens that a query sees, itself included, which `sliding_window_size` does not count."""
    if fields.raw.get("sliding_window_size") is not None:
        return fields.count("sliding_window_size") + 1
    return fields.count("sliding_window", _WINDOW)


def _check_authors_settings(fields: Fields) -> None:
    """Raise `StartupError` for a setting of the authors' code with which the model would differ from transformers'."""
    kv_heads = fields.count("num_key_value_heads", 4)
    fields.check_value("swa_num_key_value_heads", 2 * kv_heads)
    fields.check_value("swa_num_attention_heads", fields.count("num_attention_heads"))
    fields.check_value("swa_head_dim", head_width(fields, _HEAD))
    fields.check_value("swa_v_head_dim", fields.count("v_head_dim", _VALUE))
    fields.check_value("layernorm_epsilon", fields.number("rms_norm_eps", 1e-5))
    heads = fields.count("num_attention_heads")
    if heads % (2 * kv_heads):
        raise StartupError(
            f"config.json: {heads} attention heads cannot share {2 * kv_heads} key-value heads evenly, twice "
            "num_key_value_heads in layers with a window.",
            "Repair num_attention_heads or num_key_value_heads.",
        )


def _with_values(layer: LayerSpec, width: int, scale: float) -> LayerSpec:
    """Return the layer with values of `width` elements, and with the heads and sinks of a window if it has one."""
    first, *others = layer.branches
    assert isinstance(first.sublayer, SelfAttentionSpec)
    is_local, kv_heads = first.sublayer.window is not None, first.sublayer.num_kv_heads
    attention = replace(
        first.sublayer,
        num_kv_heads=2 * kv_heads if is_local else kv_heads,
        value_dim=width,
        value_scale=scale,
        sinks=is_local,
    )
    return replace(layer, branches=(replace(first, sublayer=attention), *others))


FAMILIES: dict[str, Describe] = {
    "MiMoV2FlashForCausalLM": describe_mimo_v2_flash,
}
