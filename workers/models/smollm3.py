"""SmolLM3: Llama's layer, and no rotary embedding in every fourth layer. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, layer_kinds, sliding_windows, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS = 32768


def describe_smollm3(fields: Fields) -> DecoderSpec:
    """Describe SmolLM3. Without `layer_types`, the layers that are not rotated have the window, if it is enabled."""
    bias, rotated = fields.flag("attention_bias", False), _rotated(fields)
    rope = usual_rope(fields, None, _POSITIONS, theta=2_000_000.0)
    slides = fields.flag("use_sliding_window", False)
    kinds = layer_kinds(fields)
    if kinds is None:
        slides = slides and fields.raw.get("sliding_window") is not None
        kinds = ["sliding_attention" if slides and not is_rotated else "full_attention" for is_rotated in rotated]
    elif "sliding_attention" in kinds and not slides:
        raise unsupported("use_sliding_window", slides, "layer_types has layers of sliding_attention.")
    return decoder_spec(
        fields,
        kv_heads=4,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=sliding_windows(fields, kinds, None),
        rope=rope,
        ropes=[rope if is_rotated else None for is_rotated in rotated],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tied=True,
    )


def _rotated(fields: Fields) -> list[bool]:
    """Return whether each layer has rotary embedding: `no_rope_layers`, whose ones mean that it has."""
    layers, given = fields.layers(), fields.raw.get("no_rope_layers")
    if given is None:
        interval = fields.count("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
        raise unsupported("no_rope_layers", given, f"A list of 0 or 1 for each of the {layers} layers.")
    return [bool(one) for one in given[:layers]]


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    tensors = settings.model.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}


GGUF_SMOLLM3 = GGUFFamily("smollm3", "SmolLM3ForCausalLM", _own, pairs_neighbours=True)


FAMILIES: dict[str, Describe] = {
    "SmolLM3ForCausalLM": describe_smollm3,
}
GGUF_FAMILIES = (GGUF_SMOLLM3,)
