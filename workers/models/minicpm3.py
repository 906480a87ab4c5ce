"""MiniCPM 3 and Youtu: dense layers with latent attention. Torch-free."""

import math
from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields
from oarlock.workers.models.hf_latent import LatentDefaults, gguf_latent, latent_attention, with_latent_attention

_MINICPM3 = LatentDefaults(nope_width=64, rope_width=32, kv_rank=256, q_rank=768, positions=32768)
_YOUTU = LatentDefaults(positions=131072)


def describe_minicpm3(fields: Fields) -> DecoderSpec:
    """Describe MiniCPM 3, which scales its embedding, the result of each sublayer, and the last hidden states."""
    hidden, heads, layers = fields.count("hidden_size"), fields.count("num_attention_heads"), fields.layers()
    defaults = replace(_MINICPM3, value_dim=max(1, hidden // heads))
    attention = latent_attention(fields, defaults, interleaved=False)
    depth = fields.number_or_none("scale_depth", 1.4) or math.sqrt(layers)
    base = fields.number_or_none("dim_model_base", 256) or hidden
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_MINICPM3.positions,
        windows=(None,) * layers,
        rope=attention.rope,
        mlp_bias=fields.flag("mlp_bias", False),
        residual_scale=depth / math.sqrt(layers),
        embedding_scale=fields.number("scale_emb", 12),
        logit_scale=base / hidden,
        tied=True,
        eps=1e-5,
    )
    return with_latent_attention(spec, attention)


def describe_youtu(fields: Fields) -> DecoderSpec:
    """Describe Youtu."""
    fields.serve_only({"mlp_bias": (False,)})  # which the authors' code reads
    attention = latent_attention(fields, _YOUTU, interleaved=fields.flag("rope_interleave", True))
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_YOUTU.positions,
        windows=(None,) * fields.layers(),
        rope=attention.rope,
        tied=True,
    )
    return with_latent_attention(spec, attention)


GGUF_MINICPM3 = GGUFFamily("minicpm3", "MiniCPM3ForCausalLM", gguf_latent, has_latents=True)


FAMILIES: dict[str, Describe] = {
    "MiniCPM3ForCausalLM": describe_minicpm3,
    "YoutuForCausalLM": describe_youtu,
}
GGUF_FAMILIES = (GGUF_MINICPM3,)
