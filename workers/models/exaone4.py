"""EXAONE 4: norms of heads and of results. With windows, only the layers that have one are rotated. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, layer_kinds, sliding_windows, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS = 2048


def describe_exaone4(fields: Fields) -> DecoderSpec:
    """Describe EXAONE 4. Without `layer_types`, every `sliding_window_pattern`-th layer has full attention."""
    layers, kinds = fields.layers(), layer_kinds(fields)
    has_windows = fields.raw.get("sliding_window", 4096) is not None
    if kinds is None and has_windows:
        full_every = fields.count("sliding_window_pattern", 4)
        kinds = ["sliding_attention" if (index + 1) % full_every else "full_attention" for index in range(layers)]
    windows = sliding_windows(fields, kinds or ["full_attention"] * layers, 4096)
    rope = usual_rope(fields, None, _POSITIONS)
    return decoder_spec(
        fields,
        kv_heads=32,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=[rope if window is not None or not has_windows else None for window in windows],
        qk_norm="head",
        norms=((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
        eps=1e-5,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    window = settings.count(".attention.sliding_window", 0) or None
    layers = config["num_hidden_layers"]
    kinds = ["full_attention"] * layers if window is None else settings.layer_kinds(layers, 4)
    return {"sliding_window": window, "layer_types": kinds}


GGUF_EXAONE4 = GGUFFamily("exaone4", "Exaone4ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "Exaone4ForCausalLM": describe_exaone4,
}
GGUF_FAMILIES = (GGUF_EXAONE4,)
