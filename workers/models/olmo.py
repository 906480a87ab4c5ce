"""OLMo 1 and 2, and OLMoE, an MoE model. Torch-free.

OLMo 1 has LayerNorms without weights, and limits the size of queries, keys and values. OLMo 2 and OLMoE norm q and k
over all heads. OLMo 2 only norms the results of attention and MLP. OLMoE norms the inputs of attention and experts.
"""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_fields import Fields

_CLAMP = ".attention.clamp_kqv"  # setting of GGUF files


def describe_olmo(fields: Fields) -> DecoderSpec:
    bias, limit = fields.flag("attention_bias", False), fields.number_or_none("clip_qkv", None)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        norm=NormSpec("layer", 1e-5, weight=False),
    )
    return spec.with_sublayers(lambda one: replace(one, clip_qkv=limit) if isinstance(one, SelfAttentionSpec) else one)


def _own_olmo(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {"clip_qkv": settings.number(_CLAMP) if settings.has(_CLAMP) else None}


GGUF_OLMO = GGUFFamily("olmo", "OlmoForCausalLM", _own_olmo, pairs_neighbours=True)


def describe_olmo2(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        norms=((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
        eps=1e-5,
    )


def _own_olmo2(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    if settings.has(".attention.sliding_window"):  # OLMo 3, for which the converter uses the same name
        raise StartupError(f"{settings.model.path} has windows, which olmo2 models do not.", "Use a model of OLMo 2.")
    return {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}


GGUF_OLMO2 = GGUFFamily("olmo2", "Olmo2ForCausalLM", _own_olmo2)


def describe_olmoe(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, 64, 8)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=fields.flag("norm_topk_prob", False))
    mixture = ExpertsSpec(experts, fields.count("intermediate_size", 2048), router, activation)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=4096,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        experts=(mixture,) * fields.layers(),
        activation=activation,
        eps=1e-5,
    )


def _own_olmoe(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    clamp = {"clip_qkv": settings.number(_CLAMP)} if settings.has(_CLAMP) else {}
    return {"norm_topk_prob": False, **clamp}


GGUF_OLMOE = GGUFFamily("olmoe", "OlmoeForCausalLM", _own_olmoe, has_experts=True)
