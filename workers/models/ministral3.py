"""Ministral 3: Llama's layer with YaRN, and queries that are scaled by their position. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import QueryScale, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, head_width
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import LENGTH, rope_spec, rope_table, trained_length

_POSITIONS, _HEAD, _BETA = 262_144, 128, "llama_4_scaling_beta"
_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, LENGTH: 16384, "mscale": 1.0, "mscale_all_dim": 1.0,
    _BETA: 0.1,
}  # fmt: skip


def describe_ministral3(fields: Fields) -> DecoderSpec:
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "Ministral 3 has one window for all layers.")
    table = {key: value for key, value in rope_table(fields).items() if value is not None} or dict(_ROPE)
    beta, positions = table.pop(_BETA, 0), fields.count("max_position_embeddings", _POSITIONS)
    table.pop("max_position_embeddings", None)  # the number outside the table, once more
    scale = None
    if beta != 0 or isinstance(beta, bool):
        if LENGTH not in table:
            raise unsupported(f"rope setting {_BETA}", beta, f"It needs {LENGTH}.")
        period = trained_length(table[LENGTH], positions)
        scale = QueryScale(positive_number(f"rope setting {_BETA}", beta, None), period)
    window = None if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(window,) * fields.layers(),
        rope=rope_spec(table, head_width(fields, _HEAD), positions),
        eps=1e-5,
    )
    return spec.with_sublayers(
        lambda one: replace(one, query_scale=scale) if isinstance(one, SelfAttentionSpec) else one
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Ministral 3, or of Mistral, whose files have the same architecture but no query scale."""
    settings.check_whole_heads(config["head_dim"])
    if not settings.has(".attention.temperature_scale"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    scales = {"mscale": 1.0, "mscale_all_dim": settings.number(".rope.scaling.yarn_log_multiplier", 1.0)}
    beta = {_BETA: settings.number(".attention.temperature_scale")}
    return {"rope_scaling": {**(config["rope_scaling"] or {}), **scales, **beta}}


GGUF_MISTRAL3 = GGUFFamily("mistral3", "Ministral3ForCausalLM", _own, "ministral3", pairs_neighbours=True)


FAMILIES: dict[str, Describe] = {
    "Ministral3ForCausalLM": describe_ministral3,
}
GGUF_FAMILIES = (GGUF_MISTRAL3,)
