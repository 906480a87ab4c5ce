"""Phi 1, 1.5 and 2: attention and an MLP without a gate in parallel, partial rotary embedding, a biased head.
Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, head_width
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table

_LAYER = "model.layers.*"
_NAMES = TensorNames(
    modules={
        "model.final_layernorm": "model.norm", f"{_LAYER}.self_attn.dense": f"{_LAYER}.self_attn.o_proj",
        f"{_LAYER}.mlp.fc1": f"{_LAYER}.mlp.up_proj", f"{_LAYER}.mlp.fc2": f"{_LAYER}.mlp.down_proj",
    }
)  # fmt: skip


def describe_phi(fields: Fields) -> DecoderSpec:
    if fields.flag("qk_layernorm", False):
        raise unsupported("qk_layernorm", True, "Phi 1, 1.5 and 2 do not norm queries and keys.")
    table, length = rope_table(fields), fields.count("max_position_embeddings", 2048)
    share = positive_number(
        "partial_rotary_factor", table.get("partial_rotary_factor"), fields.number("partial_rotary_factor", 0.5)
    )
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        rope=rope_spec(table, head_width(fields, None), length, share=share),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=activation_name(fields, "hidden_act", "gelu_new", gated=False),
        norm=NormSpec("layer", fields.number("layer_norm_eps", 1e-5), bias=True),
        norms=(("input_layernorm", None), ("input_layernorm", None)),
        parallel=True,
    )
    return replace(spec, head_bias=True, names=_NAMES)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of other families. Files do not record the activation, which all
    published models share."""
    rotated = settings.count(".rope.dimension_count")
    return {
        "hidden_act": "gelu_new",
        "layer_norm_eps": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "partial_rotary_factor": rotated / config["head_dim"],
    }


GGUF_PHI2 = GGUFFamily("phi2", "PhiForCausalLM", _own, "phi")


FAMILIES: dict[str, Describe] = {
    "PhiForCausalLM": describe_phi,
}
GGUF_FAMILIES = (GGUF_PHI2,)
