"""OLMo 2, and the MoE models OLMoE and FlexOlmo: all norm q and k over all heads. Torch-free.

OLMo 2 and FlexOlmo only norm the results of attention and MLP or experts. OLMoE norms their inputs.
"""

from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import BEFORE, Norms, activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_fields import Fields

_AFTER: Norms = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))


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
        norms=_AFTER,
        eps=1e-5,
    )


def _own_olmo2(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    if settings.has(".attention.sliding_window"):  # OLMo 3, for which the converter uses the same name
        raise StartupError(f"{settings.model.path} has windows, which olmo2 models do not.", "Use a model of OLMo 2.")
    return {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}


GGUF_OLMO2 = GGUFFamily("olmo2", "Olmo2ForCausalLM", _own_olmo2)


def describe_olmoe(fields: Fields) -> DecoderSpec:
    return _moe_spec(fields, (64, 8), 2048, BEFORE, eps=1e-5)


def describe_flex_olmo(fields: Fields) -> DecoderSpec:
    return _moe_spec(fields, (7, 5), 11008, _AFTER, theta=500_000.0)


def _moe_spec(
    fields: Fields, counts: tuple[int, int], width: int, norms: Norms, *, eps: float = 1e-6, theta: float | None = None
) -> DecoderSpec:
    """Return the description that MoE models share. `counts` (experts, experts per token), `width`, `eps` and `theta`
    are the family's defaults."""
    bias = fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, *counts)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=fields.flag("norm_topk_prob", False))
    mixture = ExpertsSpec(experts, fields.count("intermediate_size", width), router, activation)
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
        norms=norms,
        eps=eps,
        theta=theta,
    )


def _own_olmoe(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    clamp = {"clip_qkv": settings.number(".attention.clamp_kqv")} if settings.has(".attention.clamp_kqv") else {}
    return {"norm_topk_prob": False, **clamp}


GGUF_OLMOE = GGUFFamily("olmoe", "OlmoeForCausalLM", _own_olmoe, has_experts=True)
