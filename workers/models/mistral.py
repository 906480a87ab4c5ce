"""Mistral and Ministral: Llama's layer with a sliding window; Mixtral has experts instead of an MLP. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import (
    activation_name,
    decoder_spec,
    expert_counts,
    layer_kinds,
    sliding_windows,
)
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_DEFAULT_WINDOW = 4096  # used if config.json does not mention it; an explicit null switches the window off
# Mixtral numbers the matrices of an expert.
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXTRAL_NAMES = TensorNames(
    modules={
        "model.layers.*.block_sparse_moe": "model.layers.*.mlp",
        **{
            f"model.layers.*.block_sparse_moe.experts.*.{stored}": f"model.layers.*.mlp.experts.*.{part}"
            for stored, part in _PARTS.items()
        },
    }
)


def describe_mistral(fields: Fields) -> DecoderSpec:
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "Mistral has one window for all layers.")
    window = None
    if fields.raw.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = fields.count("sliding_window", _DEFAULT_WINDOW)
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=4096 * 32,
        windows=(window,) * fields.layers(),
    )


def describe_ministral(fields: Fields) -> DecoderSpec:
    """Describe Ministral 8B. Without `layer_types`, all its layers have the window."""
    kinds = layer_kinds(fields)
    if kinds is None:
        has_window = fields.raw.get("sliding_window", _DEFAULT_WINDOW) is not None
        kinds = ["sliding_attention" if has_window else "full_attention"] * fields.layers()
    return decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=4096 * 32,
        windows=sliding_windows(fields, kinds, _DEFAULT_WINDOW),
    )


def describe_mixtral(fields: Fields) -> DecoderSpec:
    """Describe Mixtral. The weights of a token's experts add up to 1."""
    window = None if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
    experts, top_k = expert_counts(fields, 8, 2)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=True)
    mixture = ExpertsSpec(experts, fields.count("intermediate_size"), router, activation)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=4096 * 32,
        windows=(window,) * fields.layers(),
        experts=(mixture,) * fields.layers(),
        activation=activation,
        eps=1e-5,
        theta=1_000_000.0,
    )
    return replace(spec, names=MIXTRAL_NAMES)


FAMILIES: dict[str, Describe] = {
    "MinistralForCausalLM": describe_ministral,
    "MistralForCausalLM": describe_mistral,
    "MixtralForCausalLM": describe_mixtral,
}
