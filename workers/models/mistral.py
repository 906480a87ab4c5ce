"""Mistral: Llama's layer with one sliding window for all layers. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Fields, unsupported

_DEFAULT_WINDOW = 4096  # of a config.json that does not mention it; an explicit null switches the window off


def describe_mistral(fields: Fields) -> DecoderSpec:
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "Mistral has one window for all layers.")
    window = None
    if fields.raw.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = fields.count("sliding_window", _DEFAULT_WINDOW)
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=4096 * 32,
        windows=(window,) * fields.layers(),
    )
