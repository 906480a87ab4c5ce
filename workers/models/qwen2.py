"""Qwen2 and Qwen2.5: biases on q, k and v, none on the output projection. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec, layer_windows
from oarlock.workers.models.hf_fields import Fields


def describe_qwen2(fields: Fields) -> DecoderSpec:
    return decoder_spec(
        fields, kv_heads=32, head_dim=None, max_positions=32768, windows=qwen_windows(fields), qkv_bias=True
    )


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """The window counts only if it is switched on, and only from layer `max_window_layers` on."""
    used = fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window", 4096) is not None
    window = fields.count("sliding_window", 4096) if used else None
    return layer_windows(fields, window, first_sliding=fields.count("max_window_layers", 28, least=0))
