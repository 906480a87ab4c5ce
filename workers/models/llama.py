"""Llama 2 and 3.x, and the many checkpoints that share their architecture. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Fields


def describe_llama(fields: Fields) -> DecoderSpec:
    attention_bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
