"""Nemotron-H and Nemotron 3: each layer has one sublayer: Mamba 2, attention without rotation, an MLP or experts.

The MLPs and the experts have no gate, and square a relu. Torch-free.
"""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec, SublayerSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, SharedSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width
from oarlock.workers.models.hf_experts import grouped_router
from oarlock.workers.models.hf_fields import MOST_LAYERS, Describe, Fields, unsupported
from oarlock.workers.models.hf_mamba import ATTENTION, MAMBA, MOST_TAPS, gguf_mixer, gguf_rows, kinds_of_layers

_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": "mlp", "E": "moe"}  # letters of `hybrid_override_pattern`
_MODULES = {MAMBA: "mamba", ATTENTION: "self_attn", "mlp": "mlp", "moe": "mlp"}  # our module of each kind
_UNSUPPORTED = {  # settings that other code of this architecture reads, and the values that change nothing
    "attention_bias": (False,), "mamba_proj_bias": (False,), "residual_in_fp32": (False,), "sliding_window": (),
    "moe_latent_size": (), "mamba_hidden_act": ("silu", "swish"),
}  # fmt: skip
# Settings with two names.
_NAMES = {
    "mamba_n_groups": ("n_groups", 8),
    "mamba_d_conv": ("conv_kernel", 4),
}


def describe_nemotron_h(fields: Fields) -> DecoderSpec:
    kinds = _kinds(fields)
    fields = fields.derived({**fields.raw, "num_hidden_layers": len(kinds)}).renamed(_NAMES)
    for key, values in _UNSUPPORTED.items():
        fields.check_value(key, *values)
    activation = activation_name(fields, "mlp_hidden_act", "relu2", gated=False)
    norm = NormSpec(eps=fields.number("layer_norm_epsilon", 1e-5))
    sparse = _experts(fields, activation) if "moe" in kinds else None
    if sparse is None:
        fields.count("n_routed_experts", 8, least=0)
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=128,
        max_positions=4096,
        rope=RopeSpec("default", 1e4, head_width(fields, 128)),  # which no layer has
        windows=(None,) * len(kinds),
        mlp_bias=fields.flag("mlp_bias", False),
        gated_mlp=False,
        activation=activation,
        norm=norm,
    )
    attention, mlp = (branch.sublayer for branch in spec.layers[0].branches)
    assert isinstance(attention, SelfAttentionSpec)
    of_kind: dict[str, SublayerSpec | None] = {
        MAMBA: _mixer(fields, norm.eps), ATTENTION: replace(attention, rope=None), "mlp": mlp, "moe": sparse,
    }  # fmt: skip
    layers = {kind: LayerSpec((BranchSpec(one, "norm"),)) for kind, one in of_kind.items() if one is not None}
    return replace(
        spec,
        layers=tuple(layers[kind] for kind in kinds),
        names=_names(kinds),
    )


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer: from a list, or from the letters of older configs."""
    pattern: Any = fields.raw.get("hybrid_override_pattern")
    default = [MAMBA, "moe", ATTENTION, "mlp"]
    if pattern is not None and all(fields.raw.get(key) is None for key in ("layers_block_type", "layer_types")):
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MOST_LAYERS or set(pattern) - set(_PATTERN):
            raise unsupported("hybrid_override_pattern", pattern, f"A letter of {', '.join(_PATTERN)} for each layer.")
        default = [_PATTERN[letter] for letter in pattern]
    kinds = kinds_of_layers(fields, "layers_block_type", default, ("mlp", "moe"))
    if len(kinds) > MOST_LAYERS:
        raise unsupported("layers_block_type", len(kinds), f"At most {MOST_LAYERS} layers.")
    return kinds


def _mixer(fields: Fields, eps: float) -> Mamba2Spec:
    """Return its Mamba 2. As in transformers, `time_step_min` limits time steps, and `time_step_limit` does not."""
    bias = fields.flag("use_bias", False)
    conv_bias = "mamba_conv_bias" if fields.raw.get("mamba_conv_bias") is not None else "use_conv_bias"
    least = "mamba_dt_min" if fields.raw.get("mamba_dt_min") is not None else "time_step_min"
    mamba = Mamba2Spec(
        fields.count("mamba_num_heads", 128),
        fields.count("mamba_head_dim", 64),
        fields.count("n_groups", 8),
        fields.count("ssm_state_size", 128),
        fields.count("conv_kernel", 4, least=2, most=MOST_TAPS),
        eps,
        conv_bias=fields.flag(conv_bias, True),
        projection_bias=bias,
        output_bias=bias,
        least_step=fields.number(least, 0.001),
    )
    if mamba.num_heads % mamba.groups:
        raise unsupported("n_groups", mamba.groups, f"It must divide the {mamba.num_heads} heads of Mamba.")
    return mamba


def _experts(fields: Fields, activation: str) -> ExpertsSpec:
    experts, top_k = expert_counts(fields, 8, 2)
    router = grouped_router(fields, experts, top_k)
    fields.check_value("mlp_bias", False)  # transformers' experts have none, and its shared expert does
    width, shared = (
        fields.count(key, 7688) for key in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    return ExpertsSpec(experts, width, router, activation, shared=SharedSpec(shared), is_gated=False)


def _names(kinds: list[str]) -> TensorNames:
    """Return the names: the module of every layer is called `mixer` in checkpoints, whatever its kind."""
    layers = {
        f"model.layers.{index}.mixer": f"model.layers.{index}.{_MODULES[kind]}" for index, kind in enumerate(kinds)
    }
    top = {"model.embeddings": "model.embed_tokens", "model.norm_f": "model.norm"}
    return TensorNames(prefixes={"backbone.": "model."}, modules={**layers, **top}, ignored=("mtp",))


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings. The tensors of a layer show its kind."""
    mixer, tensors = gguf_mixer(settings), settings.model.tensors
    signs = {"ssm_in": MAMBA, "attn_q": ATTENTION, "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [
        next((kind for sign, kind in signs.items() if f"blk.{index}.{sign}.weight" in tensors), "unknown")
        for index in range(config["num_hidden_layers"])
    ]
    own: dict[str, Any] = {
        "layers_block_type": kinds, "mamba_num_heads": mixer.heads, "mamba_head_dim": mixer.head_dim, "n_groups":
        mixer.groups, "ssm_state_size": mixer.state_width, "conv_kernel": mixer.taps, "use_conv_bias": mixer.conv_bias,
        "use_bias": mixer.projection_bias, "layer_norm_epsilon": config["rms_norm_eps"],
        "intermediate_size": gguf_rows(settings, "ffn_up") or 1,
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in tensors),
    }  # fmt: skip
    if "moe" not in kinds:
        return own
    settings.check_sigmoid_router()
    return own | {
        "moe_intermediate_size": gguf_rows(settings, "ffn_up_exps"),
        "moe_shared_expert_intermediate_size": gguf_rows(settings, "ffn_up_shexp"),
        "n_group": settings.count(".expert_group_count", 1),
        "topk_group": settings.count(".expert_group_used_count", 1),
        "routed_scaling_factor": settings.number(".expert_weights_scale", 1.0),
        "norm_topk_prob": settings.flag(".expert_weights_norm", True),
    }


GGUF_NEMOTRON_H, GGUF_NEMOTRON_H_MOE = (
    GGUFFamily(
        *(name, "NemotronHForCausalLM", _own, "nemotron_h"),
        has_experts=name.endswith("moe"),
        mlp_norm="attn_norm",
        layers_differ=True,
    )
    for name in ("nemotron_h", "nemotron_h_moe")
)


FAMILIES: dict[str, Describe] = {
    "NemotronHForCausalLM": describe_nemotron_h,
}
GGUF_FAMILIES = (GGUF_NEMOTRON_H, GGUF_NEMOTRON_H_MOE)
