"""Qwen3: RMSNorm on each head of q and k, heads of 128 whatever the hidden size. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Fields
from oarlock.workers.models.qwen2 import qwen_windows


def describe_qwen3(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=32,
        head_dim=128,
        max_positions=32768,
        windows=qwen_windows(fields),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
