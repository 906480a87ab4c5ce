"""Hunyuan, dense and with experts: norms of heads after the rotation, and a rotation with a fixed factor of its base.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts, head_width
from oarlock.workers.models.hf_fields import (
    LEAST_NUMBER,
    MOST_NUMBER,
    Describe,
    Fields,
    positive_number,
    unsupported,
    wrong,
)
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_POSITIONS = 2048
_NORMS = {
    f"model.layers.*.self_attn.{of}_layernorm": f"model.layers.*.self_attn.{of[0]}_norm" for of in ("query", "key")
}
_NAMES = TensorNames(modules=_NORMS)
_MOE_NAMES = TensorNames(modules=_NORMS | {"model.layers.*.mlp.gate.wg.weight": "model.layers.*.mlp.gate.weight"})
# Settings of the authors' code that transformers does not have.
_FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,), "use_cla": (False,), "use_mla": (False,), "mlp_bias": (False,),
    "position_embedding_xpos": (False,),
}  # fmt: skip
_MOE_FIXED: dict[str, tuple[Any, ...]] = {
    "num_shared_expert": (1,), "moe_layer_num_skipped": (0,), "use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,),
    "routed_scaling_factor": (1,), "group_limited_greedy": (False,),
}  # fmt: skip
_OF_LAYERS = ("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size")


def describe_hunyuan_dense(fields: Fields) -> DecoderSpec:
    fields = _without_latent_attention(fields)
    fields.serve_only({"num_experts": (0, 1)})
    return replace(_described(fields), names=_NAMES)


def describe_hunyuan_moe(fields: Fields) -> DecoderSpec:
    """Describe Hunyuan with experts in every layer, each as wide as the shared expert."""
    fields = _without_latent_attention(
        fields.derived({**fields.raw, **{key: _common(fields, key) for key in _OF_LAYERS}})
    )
    width = fields.count("intermediate_size", 11008)
    fields.serve_only({**_MOE_FIXED, "moe_intermediate_size": (width,)})
    experts, top_k = expert_counts(fields, 1, 1, _chosen_key(fields))
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=True)
    mixture = ExpertsSpec(experts, width, router, activation, shared=SharedSpec(width, "shared_mlp"))
    return replace(_described(fields, mixture), names=_MOE_NAMES)


def _without_latent_attention(fields: Fields) -> Fields:
    """Return the settings without the ranks of latent attention, if they are given but not used."""
    return fields.derived({**fields.raw, "kv_lora_rank": None}) if fields.raw.get("use_mla") is False else fields


def _chosen_key(fields: Fields) -> str:
    """Return the key of the number of experts per token, which has two names."""
    given = [key for key in ("moe_topk", "num_experts_per_tok") if fields.raw.get(key) is not None]
    if len({fields.count(key) for key in given}) > 1:
        raise StartupError(f"config.json: {' and '.join(given)} differ.", "Repair one of them.")
    return given[0] if given else "moe_topk"


def _common(fields: Fields, key: str) -> Any:
    """Return the setting of all layers, which may be a list with one for each layer."""
    value = fields.raw.get(key)
    if not isinstance(value, list):
        return value
    if len(value) < fields.layers() or any(type(one) is not int or one != value[0] for one in value):
        raise unsupported(key, value, "One number, or the same number for each layer.")
    return value[0]


def _described(fields: Fields, mixture: ExpertsSpec | None = None) -> DecoderSpec:
    head_dim, bias = head_width(fields, None), fields.flag("attention_bias", False)
    fields.serve_only({**_FIXED, "attention_head_dim": (head_dim,)})
    table, positions = rope_table(fields), fields.count("max_position_embeddings", _POSITIONS)
    alpha, kind = table.pop("alpha", None), table.get("rope_type", table.get("type"))
    if alpha is not None and kind in ("dynamic", "ntk_alpha"):
        # The base is stretched for all lengths alike: the other settings of dynamic scaling have no effect.
        if head_dim < 4:
            raise unsupported("head_dim", head_dim, "This rotary embedding needs at least four elements of a head.")
        stretch = positive_number("rope setting alpha", alpha, None) ** (head_dim / (head_dim - 2))
        theta = positive_number("rope_theta", table.get("rope_theta"), 10000.0) * stretch
        if not LEAST_NUMBER <= theta <= MOST_NUMBER:
            raise wrong("rope setting alpha", f"such that the base is {LEAST_NUMBER:g} to {MOST_NUMBER:g}", alpha)
        table = {"rope_theta": theta}
    elif alpha is not None:
        raise unsupported("rope setting alpha", alpha, "It belongs to rope type dynamic.")
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * fields.layers(),
        rope=rope_spec(table, head_dim, positions),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        experts=(mixture,) * fields.layers() if mixture else (),
        eps=1e-5,
    )
    return spec.with_sublayers(
        lambda one: replace(one, norms_after_rotation=True) if isinstance(one, SelfAttentionSpec) else one
    )


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}


def _own_of_experts(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    width = settings.count(".expert_feed_forward_length")
    if settings.count(".expert_shared_feed_forward_length", width) != width:
        raise StartupError(
            f"{settings.model.path} has experts whose width is not that of the shared expert.", "Use another model."
        )
    return {**_own(settings, config), "intermediate_size": width}


GGUF_HUNYUAN_DENSE = GGUFFamily("hunyuan-dense", "HunYuanDenseV1ForCausalLM", _own, "hunyuan_v1_dense")
GGUF_HUNYUAN_MOE = GGUFFamily(
    "hunyuan-moe", "HunYuanMoEV1ForCausalLM", _own_of_experts, "hunyuan_v1_moe", has_experts=True
)


FAMILIES: dict[str, Describe] = {
    "HunYuanDenseV1ForCausalLM": describe_hunyuan_dense,
    "HunYuanMoEV1ForCausalLM": describe_hunyuan_moe,
}
GGUF_FAMILIES = (
    GGUF_HUNYUAN_DENSE,
    GGUF_HUNYUAN_MOE,
)
