"""Qwen2-MoE, which has a gated shared expert, and Qwen3-MoE. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, layer_kinds
from oarlock.workers.models.hf_experts import sparse_by_step
from oarlock.workers.models.hf_fields import Describe, Fields


def describe_qwen2_moe(fields: Fields) -> DecoderSpec:
    """Describe Qwen1.5-MoE and Qwen2-57B-A14B: biases like Qwen2, and a window, if enabled, in every other layer."""
    shared = SharedSpec(fields.count("shared_expert_intermediate_size", 5632), "shared_expert", "shared_expert_gate")
    experts, activation = _experts(fields, 60, 4, 1408, shared)
    layers, window, most = fields.layers(), _window(fields), fields.count("max_window_layers", 28, least=0)
    kinds = layer_kinds(fields) or [
        "full_attention" if index % 2 or index >= most else "sliding_attention" for index in range(layers)
    ]
    return decoder_spec(
        fields,
        kv_heads=16,
        head_dim=None,
        max_positions=32768,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        qkv_bias=fields.flag("qkv_bias", True),
        experts=[experts if sparse else None for sparse in sparse_by_step(fields)],
        activation=activation,
    )


def describe_qwen3_moe(fields: Fields) -> DecoderSpec:
    """Describe Qwen3-MoE: RMSNorm on each head of q and k, and a window, if enabled, in all layers."""
    bias = fields.flag("attention_bias", False)
    experts, activation = _experts(fields, 128, 8, 768, None)
    return decoder_spec(
        fields,
        kv_heads=4,
        head_dim=None,
        max_positions=32768,
        windows=(_window(fields),) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=[experts if sparse else None for sparse in sparse_by_step(fields)],
        activation=activation,
    )


def _experts(fields: Fields, count: int, chosen: int, width: int, shared: SharedSpec | None) -> tuple[ExpertsSpec, str]:
    """Return the experts, given their default numbers, and the activation."""
    experts, top_k = expert_counts(fields, count, chosen)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=fields.flag("norm_topk_prob", False))
    width = fields.count("moe_intermediate_size", width)
    return ExpertsSpec(experts, width, router, activation, shared=shared), activation


def _window(fields: Fields) -> int | None:
    used = fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window", 4096) is not None
    return fields.count("sliding_window", 4096) if used else None


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Qwen's settings.

    The file does not record whether the experts' weights add up to 1; all models of an architecture are alike in this.
    """
    settings.check_whole_heads(config["head_dim"])
    own: dict[str, Any] = {
        "use_sliding_window": False,
        "moe_intermediate_size": settings.count(".expert_feed_forward_length"),
        "norm_topk_prob": settings.architecture != "qwen2moe",
    }
    if settings.architecture == "qwen2moe":
        own["shared_expert_intermediate_size"] = settings.count(".expert_shared_feed_forward_length")
    return own


GGUF_QWEN2_MOE = GGUFFamily("qwen2moe", "Qwen2MoeForCausalLM", _own, "qwen2_moe", has_experts=True)
GGUF_QWEN3_MOE = GGUFFamily("qwen3moe", "Qwen3MoeForCausalLM", _own, "qwen3_moe", has_experts=True)
GGUF_QWEN3_VL_MOE = GGUFFamily(
    *("qwen3vlmoe", "Qwen3MoeForCausalLM", _own, "qwen3_moe"),
    has_experts=True,
    others=("Qwen3VLMoeForConditionalGeneration",),
)


FAMILIES: dict[str, Describe] = {
    "Qwen2MoeForCausalLM": describe_qwen2_moe,
    "Qwen3MoeForCausalLM": describe_qwen3_moe,
}
GGUF_FAMILIES = (
    GGUF_QWEN3_VL_MOE,
    GGUF_QWEN2_MOE,
    GGUF_QWEN3_MOE,
)
