"""Llama 4, the text model: chunks in most layers, scaled queries in the others, and experts with weighted inputs.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import QueryScale, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width, layer_kinds
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_POSITIONS, _HEAD, _CHUNK, _PERIOD = 131_072, 128, 8192, 8192
_EXPERTS = "model.layers.*.mlp.experts"
LLAMA4_NAMES = TensorNames(
    modules={"model.layers.*.feed_forward": "model.layers.*.mlp"},
    transposed=(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"),
)
_WITHOUT_NORMS = 128  # number of experts of the models whose heads are not normed, which GGUF does not record


def describe_llama4(fields: Fields) -> DecoderSpec:
    """Describe Llama 4. Layers without rotation scale their queries by position."""
    if type(tuning := fields.raw.get("attn_temperature_tuning")) is int:  # early checkpoints have a number
        fields = fields.derived({**fields.raw, "attn_temperature_tuning": bool(tuning)})
    is_rotated = _rotated(fields)
    default = ["chunked_attention" if rotated else "full_attention" for rotated in is_rotated]
    is_chunked = [kind == "chunked_attention" for kind in layer_kinds(fields, "chunked_attention") or default]
    if fields.raw.get("attention_chunk_size", _CHUNK) is None and any(is_chunked):
        raise unsupported("attention_chunk_size", None, "It must be a number of tokens.")
    chunk, bias = fields.count("attention_chunk_size", _CHUNK), fields.flag("attention_bias", False)
    table = {"rope_theta": 500_000.0} | {key: value for key, value in rope_table(fields).items() if value is not None}
    positions = fields.count("max_position_embeddings", _POSITIONS)
    original = fields.raw.get("original_max_position_embeddings")
    rope = replace(rope_spec(table, head_width(fields, _HEAD), positions, original=original), interleaved=True)
    activation = activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 16, 1)
    width, dense_width = fields.count("intermediate_size", 8192), fields.count("intermediate_size_mlp", 16384)
    router = RouterSpec(top_k, "sigmoid", name="router")
    shared = SharedSpec(width, "shared_expert")
    mixture = ExpertsSpec(experts, width, router, activation, weighs_inputs=True, shared=shared)
    scale = QueryScale(fields.number("attn_scale", 0.1), fields.count("floor_scale", _PERIOD), 1)
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5), weight=False)
    is_scaled, is_normed = fields.flag("attn_temperature_tuning", True), fields.flag("use_qk_norm", True)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=tuple(chunk if chunked else None for chunked in is_chunked),
        rope=rope,
        ropes=[rope if rotated else None for rotated in is_rotated],
        qkv_bias=bias,
        o_bias=bias,
        activation=activation,
        experts=[mixture if sparse else None for sparse in _sparse(fields)],
        eps=1e-5,
    )

    def changed(one: SublayerSpec) -> SublayerSpec:
        if isinstance(one, GatedMLPSpec):
            return replace(one, intermediate_size=dense_width)
        if not isinstance(one, SelfAttentionSpec):
            return one
        one = replace(one, window=None, chunk=one.window)
        if one.rope is None:
            return replace(one, query_scale=scale if is_scaled else None)
        return replace(one, qk_norm=norm, norms_after_rotation=True) if is_normed else one

    return replace(spec.with_sublayers(changed), names=LLAMA4_NAMES)


def _rotated(fields: Fields) -> list[bool]:
    """Return whether each layer is rotated: its entry of `no_rope_layers`, or all but every fourth."""
    layers, every, given = fields.layers(), fields.count("no_rope_layer_interval", 4), fields.raw.get("no_rope_layers")
    if given is None or given == []:
        return [(index + 1) % every != 0 for index in range(layers)]
    is_list = isinstance(given, list) and len(given) >= layers
    if not is_list or any(type(one) is not int or one not in (0, 1) for one in given):
        raise unsupported("no_rope_layers", given, f"0 or 1 for each of the {layers} layers.")
    return [one == 1 for one in given[:layers]]


def _sparse(fields: Fields) -> list[bool]:
    """Return whether each layer has experts: the layers of `moe_layers`, or every layer of some step."""
    layers, step, given = fields.layers(), fields.count("interleave_moe_layer_step", 1), fields.raw.get("moe_layers")
    if given is None:
        return [(index + 1) % step == 0 for index in range(layers)]
    if not isinstance(given, list) or any(type(one) is not int for one in given):
        raise unsupported("moe_layers", given, "A list of layers.")
    return [index in given for index in range(layers)]


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 4's settings. GGUF records neither the chunks nor the query scale: all models use the defaults."""
    settings.check_whole_heads(config["head_dim"])
    own: dict[str, Any] = {}
    if settings.count(".attention.sliding_window", _CHUNK) == 0:  # small models whose layers are all alike
        own = {"no_rope_layers": [1] * config["num_hidden_layers"]}
        own |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    return {
        "intermediate_size": settings.count(".expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": settings.count(".interleave_moe_layer_step", 1),
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "use_qk_norm": settings.count(".expert_count") != _WITHOUT_NORMS,
        **own,
    }


GGUF_LLAMA4 = GGUFFamily("llama4", "Llama4ForCausalLM", _own, "llama4_text", has_experts=True)


FAMILIES: dict[str, Describe] = {
    "Llama4ForCausalLM": describe_llama4,
}
GGUF_FAMILIES = (GGUF_LLAMA4,)
