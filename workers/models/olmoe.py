"""OLMoE: norms before attention and experts, and of q and k over all heads. Torch-free."""

from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_fields import Fields
from oarlock.workers.weights.gguf_model import GGUFFamily, Settings


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


def _own(settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    clamp = {"clip_qkv": settings.number(".attention.clamp_kqv")} if settings.has(".attention.clamp_kqv") else {}
    return {"norm_topk_prob": False, **clamp}


GGUF_OLMOE = GGUFFamily("olmoe", "OlmoeForCausalLM", _own, has_experts=True)
