"""GLM-4.5 and similar models: sigmoid routing with a correction, a shared expert, dense first layers. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, usual_rope
from oarlock.workers.models.hf_fields import Fields

_POSITIONS = 131072
_MOST_AHEAD = 16  # multi-token prediction layers; known models have one


def describe_glm4_moe(fields: Fields) -> DecoderSpec:
    """Describe GLM-4.5. Layers beyond `num_hidden_layers`, which predict tokens further ahead, are not served."""
    layers, dense = fields.layers(), fields.count("first_k_dense_replace", 1, least=0)
    if dense >= layers:
        raise StartupError(
            f"config.json: of num_hidden_layers = {layers} none has experts.", "Repair first_k_dense_replace."
        )
    activation = activation_name(fields, "hidden_act", "silu")
    ahead = fields.count("num_nextn_predict_layers", 0, least=0, most=_MOST_AHEAD)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * layers,
        rope=usual_rope(fields, None, _POSITIONS, share=0.5),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        experts=[None] * dense + [_experts(fields, activation)] * (layers - dense),
        activation=activation,
        eps=1e-5,
    )
    ignored = tuple(f"{of}.{layers + n}" for n in range(ahead) for of in ("model.layers", "blk"))
    return replace(spec, names=TensorNames(ignored=ignored))


def _experts(fields: Fields, activation: str) -> ExpertsSpec:
    experts, top_k = expert_counts(fields, 128, 8)
    groups, top_groups = fields.count("n_group", 1), fields.count("topk_group", 1)
    if experts % groups or top_groups > groups or top_k > experts // groups * top_groups or experts // groups < 2:
        raise StartupError(
            f"config.json: {top_k} of {experts} experts cannot be chosen from {top_groups} of {groups} groups.",
            "Repair n_routed_experts, num_experts, num_local_experts, moe_num_experts, n_group, topk_group or "
            "num_experts_per_tok.",
        )
    width, shared = fields.count("moe_intermediate_size", 1408), fields.count("n_shared_experts", 1)
    router = RouterSpec(
        top_k,
        "sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        correction="gate.e_score_correction_bias",
    )
    return ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return GLM's settings. The file counts multi-token prediction layers among the layers; they come last."""
    head_dim, tensors = config["head_dim"], settings.model.tensors
    ahead = settings.count(".nextn_predict_layers", 0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - ahead,
        "num_nextn_predict_layers": ahead,
        "partial_rotary_factor": settings.count(".rope.dimension_count", head_dim // 2) / head_dim,
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "n_shared_experts": settings.count(".expert_shared_count", 1),
        "first_k_dense_replace": settings.count(".leading_dense_block_count", 0),
        "n_group": settings.count(".expert_group_count", 1),
        "topk_group": settings.count(".expert_group_used_count", 1),
        "routed_scaling_factor": settings.number(".expert_weights_scale", 1.0),
        "norm_topk_prob": settings.flag(".expert_weights_norm", True),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }


GGUF_GLM4_MOE = GGUFFamily(
    "glm4moe", "Glm4MoeForCausalLM", _own, "glm4_moe", has_experts=True, mlp_norm="post_attention_norm"
)
