"""GLM-4: half of each head has interleaved rotary embedding; GLM-4-0414 norms what attention and MLP return as well.
Torch-free."""

from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import BEFORE, Norms, decoder_spec, usual_rope
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS, _HEAD = 131072, 128
_BEFORE_AND_AFTER = (
    ("input_layernorm", "post_self_attn_layernorm"),
    ("post_attention_layernorm", "post_mlp_layernorm"),
)


def describe_glm(fields: Fields) -> DecoderSpec:
    return _glm_spec(fields, BEFORE)


def describe_glm4(fields: Fields) -> DecoderSpec:
    return _glm_spec(fields, _BEFORE_AND_AFTER)


def _glm_spec(fields: Fields, norms: Norms) -> DecoderSpec:
    return decoder_spec(
        fields,
        kv_heads=2,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=usual_rope(fields, _HEAD, _POSITIONS, share=0.5, interleaved=True),
        qkv_bias=fields.flag("attention_bias", True),
        norms=norms,
        eps=1.5625e-07,
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return GLM's settings. Rows of q and k are permuted only in vision models, whose rotation has sections."""
    if settings.has(".rope.dimension_sections") or settings.count(".nextn_predict_layers", 0):
        raise StartupError(f"{settings.model.path} belongs to a vision model.", "Use a file of a text model.")
    head_dim, tensors = config["head_dim"], settings.model.tensors
    return {
        "partial_rotary_factor": settings.count(".rope.dimension_count", head_dim // 2) / head_dim,
        "attention_bias": bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & tensors.keys()),
    }


# llama.cpp has one architecture for `GlmForCausalLM` and for its predecessors, which have other names in checkpoints.
GGUF_GLM = GGUFFamily("chatglm", "GlmForCausalLM", _own, "glm")
GGUF_GLM4 = GGUFFamily("glm4", "Glm4ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "Glm4ForCausalLM": describe_glm4,
    "GlmForCausalLM": describe_glm,
}
GGUF_FAMILIES = (
    GGUF_GLM,
    GGUF_GLM4,
)
