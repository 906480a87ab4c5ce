"""Granite 4's hybrids: Mamba 2 or attention, then a shared MLP, with or without experts; Granite's multipliers.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.granite import multipliers
from oarlock.workers.models.granite_moe import granite_names
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, with_first
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_mamba import ATTENTION, MAMBA, bamba_mixer, gguf_bamba_mixer, gguf_rows, kinds_of_layers

_SHARED = "model.layers.*.shared_mlp"


def describe_granite_hybrid(fields: Fields) -> DecoderSpec:
    """Describe Granite 4 H. Its attention is rotated only if `position_embedding_type` is rope."""
    layers, bias = fields.layers(), fields.flag("attention_bias", False)
    kinds = kinds_of_layers(fields, "layer_types", [MAMBA] * layers)
    if len(kinds) != layers:
        raise unsupported("layer_types", kinds, f"One kind for each of the {layers} layers.")
    fields.check_value("position_embedding_type", "nope", "rope")
    activation, width = activation_name(fields, "hidden_act", "silu"), fields.count("shared_intermediate_size", 1024)
    one, names = GatedMLPSpec(width, activation), _dense_names()
    if fields.raw.get("num_local_experts", 8) != 0:
        experts, top_k = expert_counts(fields, 8, 2)
        shared = SharedSpec(width, "shared_mlp")
        router = RouterSpec(top_k, normalised=True, name="router")
        inner = fields.count("intermediate_size", 11008)
        one = ExpertsSpec(experts, inner, router, activation, shared=shared, module="block_sparse_moe")
        names = granite_names(shared)
    fields.count("num_local_experts", 8, least=0)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * layers,
        attention_scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        experts=(one,) * layers,
        activation=activation,
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    if fields.raw.get("position_embedding_type") != "rope":
        spec = spec.with_sublayers(lambda one: replace(one, rope=None) if isinstance(one, SelfAttentionSpec) else one)
    mamba = bamba_mixer(fields, spec.norm.eps)
    return replace(with_first(spec, mamba, [kind == MAMBA for kind in kinds]), names=names)


def _dense_names() -> TensorNames:
    """Return the names of a model whose layers have a shared MLP, but no experts."""
    ours = "model.layers.*.mlp"
    return TensorNames(
        modules={f"{_SHARED}.input_linear": f"{ours}.gate_up_proj", f"{_SHARED}.output_linear": f"{ours}.down_proj"}
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Granite's settings. Bamba's files have the same architecture, and none of its multipliers."""
    settings.check_whole_heads(config["head_dim"])
    tensors, key = settings.model.tensors, ".rope.scaling.finetuned"
    if not settings.has(key):
        raise StartupError(
            f"{settings.model.path} does not record whether attention is rotated.",
            "Use the model's safetensors checkpoint.",
        )
    layers, sparse = range(config["num_hidden_layers"]), gguf_rows(settings, "ffn_up_exps")
    shared = gguf_rows(settings, "ffn_up_shexp" if sparse else "ffn_up")
    own = multipliers(settings) | gguf_bamba_mixer(settings) | {
        "layer_types": [MAMBA if f"blk.{index}.ssm_in.weight" in tensors else ATTENTION for index in layers],
        "position_embedding_type": "rope" if settings.flag(key, False) else "nope",
        "shared_intermediate_size": shared,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
    }  # fmt: skip
    return own | ({"intermediate_size": sparse} if sparse else {"num_local_experts": 0})


GGUF_GRANITE_HYBRID = GGUFFamily(
    *("granitehybrid", "GraniteMoeHybridForCausalLM", _own, "granitemoehybrid"),
    has_experts=True,
    layers_differ=True,
    pairs_neighbours=True,
)


FAMILIES: dict[str, Describe] = {
    "GraniteMoeHybridForCausalLM": describe_granite_hybrid,
}
GGUF_FAMILIES = (GGUF_GRANITE_HYBRID,)
