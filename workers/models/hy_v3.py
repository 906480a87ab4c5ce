"""Hunyuan 3: norms of heads, a dense first layer, sigmoid routing with a correction, a shared expert. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_experts import gguf_layers_ahead, layers_ahead, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields

# Fields of published configs that describe the architecture, with the only value that its models have. An MLP with
# biases would have them in the shared expert too.
_ALWAYS = ("moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm", "qk_norm")
_MLP = "model.layers.*.mlp"
_NAMES = {
    f"{_MLP}.router.gate": f"{_MLP}.gate",
    f"{_MLP}.expert_bias": f"{_MLP}.e_score_correction_bias",
    f"{_MLP}.shared_mlp": f"{_MLP}.shared_experts",
}


def describe_hy_v3(fields: Fields) -> DecoderSpec:
    """Describe Hunyuan 3. Layers beyond `num_hidden_layers`, which predict tokens further ahead, are not served."""
    for key in _ALWAYS:
        fields.check_value(key, True)
    fields.check_value("mlp_bias", False)
    bias = fields.flag("attention_bias", False)
    activation = activation_name(fields, "hidden_act", "silu")
    experts, top_k = expert_counts(fields, 192, 8)
    width, shared = fields.count("moe_intermediate_size", 1536), fields.count("num_shared_experts", 1)
    router = RouterSpec(
        top_k,
        "sigmoid",
        normalised=True,
        scale=fields.number("router_scaling_factor", 2.826),
        correction="e_score_correction_bias",
    )
    mixture = ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared * width))
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=128,
        max_positions=131072,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=[mixture if is_sparse else None for is_sparse in sparse_layers(fields, 1)],
        activation=activation,
        eps=1e-5,
        theta=11_158_840.0,
    )
    return replace(spec, names=TensorNames(modules=_NAMES, ignored=layers_ahead(fields)))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Hunyuan's settings. The tensors show which layers are dense, and the width of the shared experts."""
    settings.check_whole_heads(config["head_dim"])
    settings.check_sigmoid_router()
    own, width = gguf_layers_ahead(settings, config), settings.count(".expert_feed_forward_length")
    tensors = settings.model.tensors
    kinds = [f"blk.{index}.ffn_gate_inp.weight" in tensors for index in range(own["num_hidden_layers"])]
    return own | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in kinds],
        "moe_intermediate_size": width,
        "num_shared_experts": settings.count(".expert_shared_feed_forward_length", width) // width,
        "route_norm": settings.flag(".expert_weights_norm", True),
        "router_scaling_factor": settings.number(".expert_weights_scale", 1.0),
    }


GGUF_HY_V3 = GGUFFamily("hy_v3", "HYV3ForCausalLM", _own, has_experts=True)


FAMILIES: dict[str, Describe] = {
    "HYV3ForCausalLM": describe_hy_v3,
}
GGUF_FAMILIES = (GGUF_HY_V3,)
