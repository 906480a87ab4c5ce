"""HyperCLOVA X: Granite's multipliers, and a norm after attention and after the MLP. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import BEFORE, decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields

_BEFORE_AND_AFTER = (("input_layernorm", "post_norm1"), ("post_attention_layernorm", "post_norm2"))


def describe_hyperclovax(fields: Fields) -> DecoderSpec:
    """Describe HyperCLOVA X, whose `logits_scaling` multiplies the logits: Granite's divides them."""
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        attention_scale=fields.number_or_none("attention_multiplier", None),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        norms=_BEFORE_AND_AFTER if fields.flag("use_post_norm", True) else BEFORE,
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("logits_scaling", 1.0),
    )


FAMILIES: dict[str, Describe] = {
    "HyperCLOVAXForCausalLM": describe_hyperclovax,
}
