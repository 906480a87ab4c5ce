"""Granite's mixtures of experts, with and without a shared expert: four factors for embedding, attention, residual and
logits. Torch-free."""

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.models.hf_config import activation_name, decoder_spec, expert_counts
from oarlock.workers.models.hf_fields import Fields


def describe_granite_moe(fields: Fields) -> DecoderSpec:
    return _described(fields, None)


def describe_granite_moe_shared(fields: Fields) -> DecoderSpec:
    width = fields.count("shared_intermediate_size", 0, least=0)
    return _described(fields, SharedSpec(width, "shared_mlp") if width else None)


def _described(fields: Fields, shared: SharedSpec | None) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    experts, top_k = expert_counts(fields, 8, 2)
    activation = activation_name(fields, "hidden_act", "silu")
    router = RouterSpec(top_k, normalised=True, name="router")
    width = fields.count("intermediate_size", 11008)
    return decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        attention_scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        experts=ExpertsSpec(experts, width, router, activation, shared=shared, module="block_sparse_moe"),
        activation=activation,
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
