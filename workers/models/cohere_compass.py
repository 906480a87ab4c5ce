"""Cohere Compass, the text model: Command R's parallel layer, with a rotary table or none for each kind of layer.
Torch-free."""

from collections.abc import Iterable
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.hf_config import decoder_spec, layer_kinds, sliding_windows
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_POSITIONS = 8192
_SECTIONS = ("mrope_section", "mrope_interleaved")


def describe_cohere_compass(fields: Fields) -> DecoderSpec:
    """Describe the text model."""
    layers, width = fields.layers(), max(1, fields.count("hidden_size") // fields.count("num_attention_heads"))
    if fields.count("head_dim", width) != width:
        raise unsupported("head_dim", fields.raw["head_dim"], "Heads have hidden_size / num_attention_heads elements.")
    kinds, bias = layer_kinds(fields) or ["full_attention"] * layers, fields.flag("attention_bias", False)
    positions, scale = fields.count("max_position_embeddings", _POSITIONS), fields.number_or_none("logit_scale", None)
    tables = _rope_tables(fields, dict.fromkeys(kinds))
    ropes = {kind: None if table is None else rope_spec(table, width, positions) for kind, table in tables.items()}
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=sliding_windows(fields, kinds, 4096),
        rope=next(filter(None, ropes.values()), rope_spec({}, width, positions)),
        ropes=[ropes[kind] for kind in kinds],
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5)),
        norms=(("input_layernorm", None), ("input_layernorm", None)),
        parallel=True,
        logit_scale=1.0 if scale is None else scale,
        tied=True,
    )


def _rope_tables(fields: Fields, kinds: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Return the rotary settings of each kind of layer, None where the config has null: no rotation.

    For text the three axes of positions are equal, so that the sections of a head that belong to each do not matter.
    """
    given, found = fields.raw.get("rope_parameters"), {}
    if fields.raw.get("rope_scaling") is not None or not isinstance(given, dict):
        raise unsupported(
            "rope_parameters", given, "It must have a table for each of layer_types, and no rope_scaling."
        )
    for kind in kinds:
        table = given.get(kind, {})
        if table is not None and (not isinstance(table, dict) or table.get("rope_theta") is None):
            raise unsupported("rope_parameters", given, f"It must have a table with rope_theta, or null, for {kind}.")
        found[kind] = table if table is None else {key: table[key] for key in table if key not in _SECTIONS}
    return found


FAMILIES: dict[str, Describe] = {
    "CohereCompassForCausalLM": describe_cohere_compass,
}
