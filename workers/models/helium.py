"""Helium: Llama's layer with interleaved rotary embedding, and no bias of the output projection. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.hf_config import decoder_spec, head_width, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS, _HEAD = 4096, 128


def describe_helium(fields: Fields) -> DecoderSpec:
    head_dim, hidden = head_width(fields, _HEAD), fields.count("hidden_size")
    if head_dim * fields.count("num_attention_heads") != hidden:
        raise unsupported("head_dim", head_dim, f"num_attention_heads * head_dim must be hidden_size = {hidden}.")
    return decoder_spec(
        fields,
        kv_heads=20,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=usual_rope(fields, head_dim, _POSITIONS, theta=100_000.0, interleaved=True),
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        eps=1e-8,
    )


FAMILIES: dict[str, Describe] = {
    "HeliumForCausalLM": describe_helium,
}
