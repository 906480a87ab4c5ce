"""GPT-NeoX and Pythia: q, k and v of a head stored together, partial rotary embedding, an MLP without a gate.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number
from oarlock.workers.models.hf_rope import rope_spec

_LAYER = "model.layers.*"
_QKV = f"{_LAYER}.self_attn.qkv_proj"
_MODULES = {
    "model.embed_in": "model.embed_tokens", "model.final_layer_norm": "model.norm", "embed_out": "lm_head",
    f"{_LAYER}.attention": f"{_LAYER}.self_attn", f"{_LAYER}.attention.query_key_value": _QKV,
    f"{_LAYER}.attention.dense": f"{_LAYER}.self_attn.o_proj",
    f"{_LAYER}.mlp.dense_h_to_4h": f"{_LAYER}.mlp.up_proj", f"{_LAYER}.mlp.dense_4h_to_h": f"{_LAYER}.mlp.down_proj",
}  # fmt: skip
_MASKS = ("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias")  # of old checkpoints


def describe_gpt_neox(fields: Fields) -> DecoderSpec:
    heads, width = fields.count("num_attention_heads"), whole_heads(fields)
    fields.check_value("num_key_value_heads", heads)
    inner = fields.table("rope_scaling") or fields.table("rope_parameters")
    theta = fields.number("rotary_emb_base", 10000.0)
    fields.check_value("rope_theta", theta)  # other families' key, which this one does not read
    share = positive_number(
        "partial_rotary_factor", inner.get("partial_rotary_factor"), fields.number("rotary_pct", 0.25)
    )
    bias = fields.flag("attention_bias", True)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=width,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        rope=rope_spec(
            {"rope_theta": theta, **inner}, width, fields.count("max_position_embeddings", 2048), share=share
        ),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated_mlp=False,
        activation=activation_name(fields, "hidden_act", "gelu", gated=False),
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5), bias=True),
        parallel=fields.flag("use_parallel_residual", True),
    )
    blocks = {_QKV: Blocks(("q_proj", "k_proj", "v_proj"), (width,) * 3, heads)}
    names = TensorNames(prefixes={"gpt_neox.": "model."}, modules=_MODULES, blocks=blocks, ignored=_MASKS)
    return replace(spec, names=names)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of other families. Files do not record the activation, which all
    published models share."""
    return {
        "hidden_act": "gelu",
        "layer_norm_eps": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "rotary_emb_base": config["rope_theta"],
        "rotary_pct": settings.count(".rope.dimension_count") / config["head_dim"],
        "use_parallel_residual": settings.flag(".use_parallel_residual", True),
    }


GGUF_GPT_NEOX = GGUFFamily("gptneox", "GPTNeoXForCausalLM", _own, "gpt_neox")


FAMILIES: dict[str, Describe] = {
    "GPTNeoXForCausalLM": describe_gpt_neox,
}
GGUF_FAMILIES = (GGUF_GPT_NEOX,)
