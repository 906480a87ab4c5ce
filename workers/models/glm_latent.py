"""GLM-4.7-Flash and GLM-5: DeepSeek V3 and V3.2 with GLM's sizes. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily
from oarlock.workers.models.deepseek import (
    SIGMOID,
    describe_indexed,
    gguf_indexed,
    latent_mixtures,
    mixture_of,
    sigmoid_mixture,
)
from oarlock.workers.models.hf_config import expert_counts
from oarlock.workers.models.hf_experts import grouped_router, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_latent import LatentDefaults, latent_attention

_LITE = LatentDefaults(nope_width=192, value_dim=256, q_rank=768, positions=202752)
_DSA = replace(_LITE, q_rank=2048)


def describe_glm4_moe_lite(fields: Fields) -> DecoderSpec:
    """Describe GLM-4.7-Flash. Layers that predict tokens further ahead are not served."""
    fields.serve_only(SIGMOID)
    is_sparse = sparse_layers(fields, 1)
    if fields.raw.get("mlp_layer_types") is None:
        fields.check_value("first_k_dense_replace", 1)  # transformers does not read it
    attention = latent_attention(fields, _LITE, interleaved=fields.flag("rope_interleave", True))
    experts, top_k = expert_counts(fields, 64, 4)
    mixture = mixture_of(fields, experts, grouped_router(fields, experts, top_k, scale=1.8), width=1536, shared=1)
    return latent_mixtures(fields, attention, mixture, is_sparse, _LITE.positions, eps=1e-5)


def describe_glm_moe_dsa(fields: Fields) -> DecoderSpec:
    """Describe GLM-5 for contexts of up to `index_topk` tokens, of which layers share the indexer's choice."""
    kinds = fields.raw.get("indexer_types")
    if kinds is not None and (not isinstance(kinds, list) or kinds[:1] != ["full"]):
        raise unsupported("indexer_types", kinds, "The first layer must have an indexer (full).")
    return describe_indexed(fields, _DSA, sigmoid_mixture(fields, groups=(1, 1)), eps=1e-5)


GGUF_GLM_DSA = GGUFFamily(
    *("glm-dsa", "GlmMoeDsaForCausalLM", gguf_indexed, "glm_moe_dsa"), has_experts=True, has_latents=True
)


FAMILIES: dict[str, Describe] = {
    "Glm4MoeLiteForCausalLM": describe_glm4_moe_lite,
    "GlmMoeDsaForCausalLM": describe_glm_moe_dsa,
}
GGUF_FAMILIES = (GGUF_GLM_DSA,)
