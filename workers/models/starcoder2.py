"""StarCoder 2: LayerNorm, biases in all linear layers, and an MLP without a gate, with the tanh of gelu. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_NAMES = TensorNames(
    modules={
        "model.layers.*.mlp.c_fc": "model.layers.*.mlp.up_proj",
        "model.layers.*.mlp.c_proj": "model.layers.*.mlp.down_proj",
    }
)
# All published models have this window. llama.cpp does not apply it, and its files do not contain it.
_WINDOW = 4096


def describe_starcoder2(fields: Fields) -> DecoderSpec:
    if fields.raw.get("layer_types") is not None:
        raise unsupported("layer_types", fields.raw["layer_types"], "StarCoder 2 has one window for all layers.")
    window = None if fields.raw.get("sliding_window") is None else fields.count("sliding_window")
    bias = fields.flag("use_bias", True)
    spec = decoder_spec(
        fields,
        kv_heads=2,
        head_dim=None,
        max_positions=4096,
        windows=(window,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=activation_name(fields, "hidden_act", "gelu_pytorch_tanh", gated=False),
        norm=NormSpec("layer", fields.number("norm_epsilon", 1e-5), bias=True),
        tied=True,
    )
    return replace(spec, names=_NAMES)


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {
        "use_bias": "blk.0.attn_q.bias" in settings.model.tensors,
        "norm_epsilon": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "sliding_window": settings.count(".attention.sliding_window", _WINDOW) or None,
    }


GGUF_STARCODER2 = GGUFFamily("starcoder2", "Starcoder2ForCausalLM", _own)


FAMILIES: dict[str, Describe] = {
    "Starcoder2ForCausalLM": describe_starcoder2,
}
GGUF_FAMILIES = (GGUF_STARCODER2,)
