"""Phi-3, 3.5, 4 and 4-mini: Llama's layer from fused checkpoints, partial rotary embedding, LongRoPE. Torch-free."""

from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, head_width
from oarlock.workers.models.hf_fields import Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_kind, rope_spec, rope_table

_POSITIONS = 4096


def describe_phi3(fields: Fields) -> DecoderSpec:
    if fields.flag("attention_bias", False):
        raise unsupported("attention_bias", True, "Phi-3 has no biases.")
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "Phi-3 has one window for all layers.")
    window = None
    if fields.raw.get("sliding_window") is not None:
        window = fields.count("sliding_window")
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(window,) * fields.layers(),
        rope=_rope(fields),
        eps=1e-5,
    )


def _rope(fields: Fields) -> RopeSpec:
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
        fields.count("max_position_embeddings", _POSITIONS),
        original=fields.count("original_max_position_embeddings", _POSITIONS),
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
