"""Gemma 3, the text model: Gemma 2's layer with head norms, and another rotary table for layers with a window.

Torch-free.
"""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.gemma2 import gemma_spec
from oarlock.workers.models.hf_config import head_width
from oarlock.workers.models.hf_fields import Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_MAX_POSITIONS = 131_072


def describe_gemma3(fields: Fields) -> DecoderSpec:
    """`attn_logit_softcapping` is not read and so refused: transformers has it in Gemma 3's config but ignores it."""
    logit_softcap = fields.number_or_none("final_logit_softcapping", None)
    head_dim, positions = head_width(fields, 256), fields.count("max_position_embeddings", _MAX_POSITIONS)
    everywhere, local = (rope_spec(table, head_dim, positions) for table in _rope_tables(fields))
    spec = gemma_spec(
        fields,
        full_every=fields.count("sliding_window_pattern", 6),
        max_positions=_MAX_POSITIONS,
        rope=everywhere,
        qk_norm=True,
    )
    return replace(spec, local_rope=local, logit_softcap=logit_softcap)


def _rope_tables(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary settings of full and of sliding layers. An old config's `rope_scaling` applies to full layers only."""
    tables, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    kinds = ("full_attention", "sliding_attention")
    if any(key not in kinds for key in tables):
        raise unsupported("rope_parameters", tables, f"Gemma 3 has one table each for {' and '.join(kinds)}.")
    inner = Fields(tables)
    full, sliding = (inner.table(kind) for kind in kinds)
    full = {"rope_theta": fields.number("rope_theta", 1_000_000.0), **full, **scaling}
    sliding = {"rope_theta": fields.number("rope_local_base_freq", 10_000.0), **sliding}
    return full, sliding
