"""Command A+ and North: Cohere 2's parallel layers with experts after dense first layers. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec, LayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.cohere import ALWAYS, PARALLEL_NORMS
from oarlock.workers.models.hf_config import (
    activation_name,
    decoder_spec,
    expert_counts,
    layer_kinds,
    sliding_windows,
    usual_rope,
)
from oarlock.workers.models.hf_experts import gguf_layers_ahead, layers_ahead, sparse_layers
from oarlock.workers.models.hf_fields import Describe, Fields

_POSITIONS, _HEAD = 8192, 128


def describe_cohere2_moe(fields: Fields) -> DecoderSpec:
    """Describe Cohere 2 with experts. Rotary embedding is in layers with a window, and in the dense first layers if
    all of them have full attention. The shared experts count as much as all others of a token together."""
    for key in ("use_parallel_block", "use_gated_activation", "rotary_pct", "position_embedding_type"):
        fields.check_value(key, ALWAYS[key])
    fields.check_value("use_qk_norm", False)
    sparse, bias = sparse_layers(fields, 0), fields.flag("attention_bias", False)
    prefix = fields.count("prefix_dense_sliding_window_pattern", 1)
    windows = sliding_windows(fields, layer_kinds(fields) or _kinds(fields, sparse, prefix), 4096)
    is_rotated = [one is not None or (prefix == 1 and not has) for one, has in zip(windows, sparse, strict=True)]
    rope = usual_rope(fields, _HEAD, _POSITIONS, interleaved=True)
    eps = fields.number_or_none("rms_norm_eps", None)
    mixture, is_averaged = _experts(fields)
    dense = fields.count("prefix_dense_intermediate_size", mixture.width)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=_HEAD,
        max_positions=_POSITIONS,
        windows=windows,
        rope=rope,
        ropes=[rope if rotated else None for rotated in is_rotated],
        qkv_bias=bias,
        o_bias=bias,
        experts=[mixture if has else GatedMLPSpec(dense, mixture.activation) for has in sparse],
        activation=mixture.activation,
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5)) if eps is None else NormSpec(eps=eps),
        norms=PARALLEL_NORMS,
        parallel=True,
        logit_scale=fields.number("logit_scale", 0.0625),
        tied=True,
    )
    layers = tuple(_halved(layer) for layer in spec.layers) if is_averaged else spec.layers
    return replace(spec, layers=layers, names=TensorNames(ignored=layers_ahead(fields)))


def _experts(fields: Fields) -> tuple[ExpertsSpec, bool]:
    """Return the experts, and whether their sum and the shared experts are averaged rather than added."""
    experts, top_k = expert_counts(fields, 8, 2)
    scores = fields.choice("expert_selection_fn", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"})
    normalised = fields.flag("norm_topk_prob", True) or scores == "softmax"
    width, shared = fields.count("intermediate_size"), fields.count("num_shared_experts", 0, least=0)
    how = fields.choice("shared_expert_combination_strategy", "average", {"average": "average", "sum": "sum"})
    activation = activation_name(fields, "hidden_act", "silu")
    one = SharedSpec(shared * width) if shared else None
    router = RouterSpec(top_k, scores, normalised=normalised)
    return ExpertsSpec(experts, width, router, activation, shared=one), bool(shared) and how == "average"


def _kinds(fields: Fields, sparse: list[bool], prefix: int) -> list[str]:
    """Return the kind of each layer: in the dense first layers every `prefix`-th has full attention, after them every
    `sliding_window_pattern`-th."""
    every, dense = fields.count("sliding_window_pattern", 4), fields.count("first_k_dense_replace", 0, least=0)
    numbers = [(index, prefix) if index < dense else (index - dense, every) for index in range(len(sparse))]
    return ["sliding_attention" if (number + 1) % step else "full_attention" for number, step in numbers]


def _halved(layer: LayerSpec) -> LayerSpec:
    """Return the layer with half of the result of its experts."""
    branches = [replace(one, scale=0.5) if isinstance(one.sublayer, ExpertsSpec) else one for one in layer.branches]
    return replace(layer, branches=tuple(branches))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return Cohere's settings. The width of the dense layers is taken from their tensor."""
    settings.check_whole_heads(config["head_dim"])
    settings.check_sigmoid_router()
    own, dense = gguf_layers_ahead(settings, config), settings.model.tensors.get("blk.0.ffn_up.weight")
    has_rms = settings.has(".attention.layer_norm_rms_epsilon")
    return own | {
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": settings.count(".leading_dense_block_count", 0),
        "intermediate_size": settings.count(".expert_feed_forward_length"),
        "layer_norm_eps": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "layer_types": settings.layer_kinds(own["num_hidden_layers"]),
        "logit_scale": settings.number(".logit_scale"),
        "norm_topk_prob": settings.flag(".expert_weights_norm", False),
        "num_shared_experts": settings.count(".expert_shared_count", 0),
        "prefix_dense_intermediate_size": None if dense is None else dense.entry.shape[0],
        "rms_norm_eps": config["rms_norm_eps"] if has_rms else None,
        "sliding_window": settings.count(".attention.sliding_window"),
    }


GGUF_COHERE2_MOE = GGUFFamily("cohere2moe", "Cohere2MoeForCausalLM", _own, "cohere2_moe", has_experts=True)


FAMILIES: dict[str, Describe] = {
    "Cohere2MoeForCausalLM": describe_cohere2_moe,
}
GGUF_FAMILIES = (GGUF_COHERE2_MOE,)
