"""Nemotron, Arcee's AFM and Jais 2: Llama's layer with an MLP without a gate, which squares a relu. Torch-free.

Nemotron norms with a LayerNorm scaled by 1 + weight and rotates a part of each head, Jais 2 has a usual LayerNorm, and
Arcee Llama's RMSNorm.
"""

from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import activation_name, decoder_spec, head_width
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_POSITIONS = 4096


def describe_arcee(fields: Fields) -> DecoderSpec:
    return _spec(fields, NormSpec(eps=fields.number("rms_norm_eps", 1e-5)), _POSITIONS)


def describe_nemotron(fields: Fields) -> DecoderSpec:
    table = rope_table(fields)
    outer = fields.number("partial_rotary_factor", 0.5)
    rope = rope_spec(
        table,
        head_width(fields, None),
        fields.count("max_position_embeddings", _POSITIONS),
        original=fields.raw.get("original_max_position_embeddings"),
        share=positive_number("partial_rotary_factor", table.get("partial_rotary_factor"), outer),
    )
    norm = NormSpec("layer", fields.number("norm_eps", 1e-5), offset=1.0, bias=True)
    return _spec(fields, norm, _POSITIONS, rope=rope)


def describe_jais2(fields: Fields) -> DecoderSpec:
    norm = NormSpec("layer", fields.number("layer_norm_eps", 1e-5), bias=True)
    return _spec(fields, norm, 8192, is_biased=True)


def _spec(
    fields: Fields, norm: NormSpec, positions: int, *, rope: RopeSpec | None = None, is_biased: bool = False
) -> DecoderSpec:
    """Return the description that all share. `is_biased`: whether the linear layers have biases by default."""
    bias = fields.flag("attention_bias", is_biased)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=positions,
        windows=(None,) * fields.layers(),
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", is_biased),
        gated_mlp=False,
        activation=activation_name(fields, "hidden_act", "relu2", gated=False),
        norm=norm,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in settings.model.tensors,
    }
    if settings.architecture == "nemotron":
        rotated = settings.count(".rope.dimension_count", config["head_dim"])
        own["partial_rotary_factor"] = rotated / config["head_dim"]
    else:
        settings.check_whole_heads(config["head_dim"])
    key = {"nemotron": "norm_eps", "jais2": "layer_norm_eps"}.get(settings.architecture)
    return own if key is None else own | {key: settings.number(".attention.layer_norm_epsilon", 1e-5)}


GGUF_ARCEE = GGUFFamily("arcee", "ArceeForCausalLM", _own, pairs_neighbours=True)
GGUF_NEMOTRON = GGUFFamily("nemotron", "NemotronForCausalLM", _own)
GGUF_JAIS2 = GGUFFamily("jais2", "Jais2ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "ArceeForCausalLM": describe_arcee,
    "Jais2ForCausalLM": describe_jais2,
    "NemotronForCausalLM": describe_nemotron,
}
GGUF_FAMILIES = (
    GGUF_ARCEE,
    GGUF_NEMOTRON,
    GGUF_JAIS2,
)
