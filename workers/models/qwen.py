"""Qwen2, Qwen2.5 and Qwen3. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, layer_windows
from oarlock.workers.models.hf_fields import Describe, Fields


def describe_qwen2(fields: Fields) -> DecoderSpec:
    """Describe Qwen2: biases on q, k and v, none on the output projection."""
    return decoder_spec(
        fields, kv_heads=32, head_dim=None, max_positions=32768, windows=_windows(fields), qkv_bias=True
    )


def describe_qwen3(fields: Fields) -> DecoderSpec:
    """Describe Qwen3: RMSNorm on each head of q and k, and heads of 128 for every hidden size."""
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=32,
        head_dim=128,
        max_positions=32768,
        windows=_windows(fields),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
    )


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer. It is used only if it is switched on, and from layer `max_window_layers` on."""
    used = fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window", 4096) is not None
    window = fields.count("sliding_window", 4096) if used else None
    return layer_windows(fields, window, first_sliding=fields.count("max_window_layers", 28, least=0))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    own: dict[str, Any] = {"use_sliding_window": False}
    if settings.architecture.startswith("qwen3"):
        own["attention_bias"] = "blk.0.attn_q.bias" in settings.model.tensors
    return own


GGUF_QWEN2 = GGUFFamily("qwen2", "Qwen2ForCausalLM", _own)
GGUF_QWEN3 = GGUFFamily("qwen3", "Qwen3ForCausalLM", _own)
# The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: positions of text are the same in all sections of the angles.
_QWEN2_VL = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
GGUF_QWEN2_VL = GGUFFamily("qwen2vl", "Qwen2ForCausalLM", _own, "qwen2", others=_QWEN2_VL)
GGUF_QWEN3_VL = GGUFFamily(*("qwen3vl", "Qwen3ForCausalLM", _own, "qwen3"), others=("Qwen3VLForConditionalGeneration",))


FAMILIES: dict[str, Describe] = {
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen3ForCausalLM": describe_qwen3,
}
GGUF_FAMILIES = (
    GGUF_QWEN2_VL,
    GGUF_QWEN3_VL,
    GGUF_QWEN2,
    GGUF_QWEN3,
)
