"""Phi-3, 3.5, 4 and 4-mini, and the text of Phi-4 multimodal: Llama's layer from fused checkpoints, partial rotary
embedding, LongRoPE. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import decoder_spec, head_width
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_kind, rope_spec, rope_table

_POSITIONS = _TRAINED = 4096


# Encoders of images and audio, and adapters that are only applied to prompts with images or audio.
_ENCODERS = ("model.embed_tokens_extend",)
_LINEAR = [
    f"model.layers.*.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
]
_ADAPTERS = tuple(f"{module}.lora_{part}" for module in _LINEAR for part in ("A", "B"))


def describe_phi4_multimodal(fields: Fields) -> DecoderSpec:
    """Describe the language model of Phi-4 multimodal, as transformers stores it."""
    return replace(_phi_spec(fields, 8, 131072), names=TensorNames(ignored=_ENCODERS))


def describe_phi4mm(fields: Fields) -> DecoderSpec:
    """Describe the language model of Phi-4 multimodal, as Microsoft stores it: with its adapters inside."""
    names = TensorNames(
        modules={f"{module}.base_layer": module for module in _LINEAR}, ignored=(*_ENCODERS, *_ADAPTERS)
    )
    return replace(_phi_spec(fields, 8, 131072), names=names)


def describe_phi3(fields: Fields) -> DecoderSpec:
    return _phi_spec(fields, None, _POSITIONS)


def _phi_spec(fields: Fields, kv_heads: int | None, max_positions: int) -> DecoderSpec:
    """Return the description that all share. `kv_heads` and `max_positions`: by default."""
    if fields.flag("attention_bias", False):
        raise unsupported("attention_bias", True, "Phi-3 has no biases.")
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "Phi-3 has one window for all layers.")
    window = None
    if fields.raw.get("sliding_window") is not None:
        window = fields.count("sliding_window")
    return decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=None,
        max_positions=max_positions,
        windows=(window,) * fields.layers(),
        rope=_rope(fields, max_positions),
        eps=1e-5,
    )


def _rope(fields: Fields, max_positions: int) -> RopeSpec:
    """Return the rotary embedding.

    Phi-3's first configs called LongRoPE `su`, and for some time `yarn`; no other scaling exists here.
    """
    table = rope_table(fields)
    if table.get("rope_type", table.get("type")) in ("su", "yarn"):
        table |= {"rope_type": "longrope"}
    if (kind := rope_kind(table)) not in ("default", "longrope"):
        raise unsupported("rope type", kind, "Phi-3 has 'default' or 'longrope'.")
    outer = fields.number("partial_rotary_factor", 1.0)
    return rope_spec(
        table,
        head_width(fields, None),
        fields.count("max_position_embeddings", max_positions),
        original=fields.count("original_max_position_embeddings", _TRAINED),
        share=positive_number("partial_rotary_factor", table.get("partial_rotary_factor"), outer),
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    rotated = settings.count(".rope.dimension_count", config["head_dim"])
    return {
        "partial_rotary_factor": rotated / config["head_dim"],
        "sliding_window": settings.count(".attention.sliding_window", 0) or None,
        "original_max_position_embeddings": settings.count(
            ".rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


GGUF_PHI3 = GGUFFamily("phi3", "Phi3ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "Phi3ForCausalLM": describe_phi3,
    "Phi4MMForCausalLM": describe_phi4mm,
    "Phi4MultimodalForCausalLM": describe_phi4_multimodal,
}
GGUF_FAMILIES = (GGUF_PHI3,)
