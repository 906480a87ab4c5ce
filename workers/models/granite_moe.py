"""Granite's MoE models, with or without a shared expert: scaled embedding, attention, residual and logits.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.models.granite import layer_ropes, multipliers
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, layer_kinds, sliding_windows
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS = 2048

_MODULE = "model.layers.*.block_sparse_moe"
_SHARED = "model.layers.*.shared_mlp"


def describe_granite_moe(fields: Fields) -> DecoderSpec:
    return _described(fields, None)


def describe_granite_moe_shared(fields: Fields) -> DecoderSpec:
    return _described(fields, _shared(fields))


def describe_granite_moe_swa(fields: Fields) -> DecoderSpec:
    """Describe Granite Swash: a sink in every head, and for each layer a window or none, and its own `rope_theta`."""
    layers = fields.layers()
    kinds = layer_kinds(fields) or ["sliding_attention" if index % 4 else "full_attention" for index in range(layers)]
    windows = sliding_windows(fields, kinds, 128)
    spec = _described(fields, _shared(fields), windows, layer_ropes(fields, _POSITIONS))
    return spec.with_sublayers(lambda one: replace(one, sinks=True) if isinstance(one, SelfAttentionSpec) else one)


def _shared(fields: Fields) -> SharedSpec | None:
    width = fields.count("shared_intermediate_size", 0, least=0)
    return SharedSpec(width, "shared_mlp") if width else None


def _described(
    fields: Fields,
    shared: SharedSpec | None,
    windows: tuple[int | None, ...] | None = None,
    ropes: list[RopeSpec | None] | None = None,
) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, 8, 2)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=True, name="router")
    width = fields.count("intermediate_size", 11008)
    mixture = ExpertsSpec(experts, width, router, activation, shared=shared, module="block_sparse_moe")
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=windows or (None,) * fields.layers(),
        ropes=ropes,
        attention_scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        experts=(mixture,) * fields.layers(),
        activation=activation,
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    return replace(spec, names=granite_names(shared))


def granite_names(shared: SharedSpec | None) -> TensorNames:
    """Return the names of modules that hold one tensor of all experts, and of a shared expert next to them."""
    names = {
        f"{_MODULE}.input_linear.weight": f"{_MODULE}.experts.gate_up_proj",
        f"{_MODULE}.output_linear.weight": f"{_MODULE}.experts.down_proj",
        f"{_MODULE}.router.layer": f"{_MODULE}.router",
    }
    if shared is None:
        return TensorNames(modules=names)
    inside = f"{_MODULE}.shared_mlp"
    of_shared = {f"{_SHARED}.input_linear": f"{inside}.gate_up_proj", f"{_SHARED}.output_linear": f"{inside}.down_proj"}
    halves = Blocks(("gate_proj", "up_proj"), (shared.width, shared.width), 1)
    return TensorNames(modules=names | of_shared, blocks={f"{inside}.gate_up_proj": halves})


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    own = multipliers(settings)
    if width := settings.count(".expert_shared_feed_forward_length", 0):
        shared = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
        own |= {**shared, "shared_intermediate_size": width}
    return own


GGUF_GRANITE_MOE = GGUFFamily(
    *("granitemoe", "GraniteMoeForCausalLM", _own),
    has_experts=True,
    pairs_neighbours=True,
    others=("GraniteMoeSharedForCausalLM",),
)


FAMILIES: dict[str, Describe] = {
    "GraniteMoeForCausalLM": describe_granite_moe,
    "GraniteMoeSWAForCausalLM": describe_granite_moe_swa,
    "GraniteMoeSharedForCausalLM": describe_granite_moe_shared,
}
GGUF_FAMILIES = (GGUF_GRANITE_MOE,)
