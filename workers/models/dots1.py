"""dots.llm1 and Solar Open: GLM-4.5's router and shared experts after Qwen3's or Llama's attention. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, layer_kinds, sliding_windows
from oarlock.workers.models.hf_experts import gguf_grouped, grouped_router, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported


def describe_dots1(fields: Fields) -> DecoderSpec:
    """Describe dots.llm1: norms of heads, dense first layers, and a window from layer `max_window_layers` on."""
    fields.check_value("scoring_func", "noaux_tc", "sigmoid")
    fields.check_value("moe_layer_freq", 1)
    layers, bias = fields.layers(), fields.flag("attention_bias", False)
    most = fields.count("max_window_layers", 62, least=0)
    if fields.raw.get("sliding_window", 4096) is None:
        most = layers
    kinds = layer_kinds(fields) or [
        "full_attention" if index < most else "sliding_attention" for index in range(layers)
    ]
    if all(fields.raw.get(key) is None for key in ("n_routed_experts", "num_local_experts", "num_experts")):
        raise unsupported("n_routed_experts", None, "It needs n_routed_experts, or num_experts.")
    counts = expert_counts(fields, 1, fields.count("num_experts_per_tok"))
    experts = _experts(fields, counts, 1408, None, normalised=False)
    return decoder_spec(
        fields,
        kv_heads=None if "num_key_value_heads" in fields.raw else 32,
        head_dim=None,
        max_positions=2048,
        windows=sliding_windows(fields, kinds, 4096),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=[experts if is_sparse else None for is_sparse in sparse_layers(fields, 0)],
        activation=experts.activation,
    )


def describe_solar_open(fields: Fields) -> DecoderSpec:
    """Describe Solar Open: every layer has experts, and q, k and v may have biases."""
    fields.check_value("first_k_dense_replace", 0)
    fields.check_value("use_qk_norm", False)
    experts = _experts(fields, expert_counts(fields, 128, 8), 1280, 1, normalised=True)
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=128,
        max_positions=131072,
        windows=(None,) * fields.layers(),
        qkv_bias=fields.flag("attention_bias", False),
        experts=(experts,) * fields.layers(),
        activation=experts.activation,
        eps=1e-5,
        theta=1e6,
    )


def _experts(
    fields: Fields, counts: tuple[int, int], width: int, shared: int | None, *, normalised: bool
) -> ExpertsSpec:
    """Return the experts. `width`, `shared` (number of shared experts) and `normalised` are the family's defaults."""
    router = grouped_router(fields, *counts, normalised=normalised)
    width = fields.count("moe_intermediate_size", width)
    activation = activation_name(fields, "hidden_act", "silu")
    one = SharedSpec(width * fields.count("n_shared_experts", shared))
    return ExpertsSpec(counts[0], width, router, activation, shared=one)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return gguf_grouped(settings, config) | {
        "n_shared_experts": settings.count(".expert_shared_count"),
        "attention_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "sliding_window": None,
    }


GGUF_DOTS1 = GGUFFamily("dots1", "Dots1ForCausalLM", _own, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "Dots1ForCausalLM": describe_dots1,
    "SolarOpenForCausalLM": describe_solar_open,
}
GGUF_FAMILIES = (GGUF_DOTS1,)
