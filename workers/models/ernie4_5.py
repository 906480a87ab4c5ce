"""Ernie 4.5, the dense models: Llama's layer with interleaved rotary embedding. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS, _HEAD = 131072, 128


def describe_ernie4_5(fields: Fields) -> DecoderSpec:
    """Describe Ernie 4.5, whose one flag is for all biases."""
    for key, value in (("compression_ratio", 1.0), ("use_rmsnorm", True)):  # fields of Baidu's own configs
        if fields.raw.get(key) not in (None, value):
            raise unsupported(key, fields.raw[key], f"Supported: {value}.")
    bias = fields.flag("use_bias", False)
    return decoder_spec(
        fields,
        kv_heads=2,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=usual_rope(fields, _HEAD, _POSITIONS, theta=500_000.0, interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=True,
        eps=1e-5,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {"use_bias": "blk.0.attn_q.bias" in settings.model.tensors}


GGUF_ERNIE4_5 = GGUFFamily("ernie4_5", "Ernie4_5ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "Ernie4_5ForCausalLM": describe_ernie4_5,
    "Ernie4_5_ForCausalLM": describe_ernie4_5,  # Baidu's own name
}
GGUF_FAMILIES = (GGUF_ERNIE4_5,)
