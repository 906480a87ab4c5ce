"""GLM-4.5 and similar models: sigmoid routing with a correction, a shared expert, dense first layers. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, usual_rope
from oarlock.workers.models.hf_experts import gguf_grouped, grouped_router, layers_ahead, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS = 131072


def describe_glm4_moe(fields: Fields) -> DecoderSpec:
    """Describe GLM-4.5. Layers beyond `num_hidden_layers`, which predict tokens further ahead, are not served."""
    layers, sparse = fields.layers(), sparse_layers(fields, 1)
    activation = activation_name(fields, "hidden_act", "silu")
    experts = _experts(fields, activation)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * layers,
        rope=usual_rope(fields, None, _POSITIONS, share=0.5),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        experts=[experts if is_sparse else None for is_sparse in sparse],
        activation=activation,
        eps=1e-5,
    )
    return replace(spec, names=TensorNames(ignored=layers_ahead(fields)))


def _experts(fields: Fields, activation: str) -> ExpertsSpec:
    experts, top_k = expert_counts(fields, 128, 8)
    router = grouped_router(fields, experts, top_k)
    width, shared = fields.count("moe_intermediate_size", 1408), fields.count("n_shared_experts", 1)
    return ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return GLM's settings, or Solar Open's, whose files have the same architecture: it rotates whole heads."""
    head_dim, tensors = config["head_dim"], settings.model.tensors
    share = settings.count(".rope.dimension_count", head_dim // 2) / head_dim
    own = gguf_grouped(settings, config) | {
        "partial_rotary_factor": share,
        "n_shared_experts": settings.count(".expert_shared_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    if share == 1 and not own["first_k_dense_replace"] and not own["use_qk_norm"]:
        own |= {"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open"}
    return own


GGUF_GLM4_MOE = GGUFFamily(
    *("glm4moe", "Glm4MoeForCausalLM", _own, "glm4_moe"),
    has_experts=True,
    mlp_norm="post_attention_norm",
    others=("SolarOpenForCausalLM",),
)


FAMILIES: dict[str, Describe] = {
    "Glm4MoeForCausalLM": describe_glm4_moe,
}
GGUF_FAMILIES = (GGUF_GLM4_MOE,)
