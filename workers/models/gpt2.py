"""GPT-2, and GPT-BigCode (StarCoder): learned positions, LayerNorm and an MLP without a gate. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, LayerSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads, with_learned_positions
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_KEYS = {
    "n_embd": ("hidden_size", 768), "n_layer": ("num_hidden_layers", 12), "n_head": ("num_attention_heads", 12),
    "n_positions": ("max_position_embeddings", 1024),
}  # fmt: skip
_LAYER, _QKV = "model.layers.*", "model.layers.*.self_attn.qkv_proj"
_IN_LAYER = {
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn": "self_attn", "attn.c_attn":
    "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip
_TOP = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm", "h.*": _LAYER}
_MASKS = ("h.*.attn.bias", "h.*.attn.masked_bias")
# The first checkpoints have no prefix, and all old ones hold the causal mask.
_NAMES = TensorNames(
    prefixes={"transformer.": ""},
    modules=_TOP | {f"h.*.{stored}": f"{_LAYER}.{ours}" for stored, ours in _IN_LAYER.items()},
    ignored=(*_MASKS, *(f"transformer.{mask}" for mask in _MASKS)),
)
_CONV1D = tuple(f"{_LAYER}.{_IN_LAYER[module]}" for module in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


def describe_gpt2(fields: Fields) -> DecoderSpec:
    fields = fields.renamed(_KEYS)
    fields.flag("reorder_and_upcast_attn", False)  # The same computation in float32, as it always is here.
    spec = replace(
        _described(fields, fields.count("num_attention_heads"), "gelu_new"), names=replace(_NAMES, transposed=_CONV1D)
    )
    if not fields.flag("scale_attn_by_inverse_layer_idx", False):
        return spec
    return replace(spec, layers=tuple(_scaled(spec, index) for index in range(spec.num_layers)))


def describe_gpt_bigcode(fields: Fields) -> DecoderSpec:
    fields = fields.renamed(_KEYS)
    heads, is_shared = fields.count("num_attention_heads"), fields.flag("multi_query", True)
    spec = _described(fields, 1 if is_shared else heads, "gelu_pytorch_tanh")
    of_heads = (
        {} if is_shared else {_QKV: Blocks(("q_proj", "k_proj", "v_proj"), (spec.attentions[0].head_dim,) * 3, heads)}
    )
    return replace(spec, names=replace(_NAMES, blocks=of_heads))


def _described(fields: Fields, kv_heads: int, activation: str) -> DecoderSpec:
    fields = fields.renamed({"n_inner": ("intermediate_size", 4 * fields.count("hidden_size"))})
    fields.check_value("num_key_value_heads", kv_heads)
    spec = decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=whole_heads(fields),
        max_positions=1024,
        windows=(None,) * fields.layers(),
        query_scalar=None if fields.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=activation_name(fields, "activation_function", activation, gated=False),
        norm=NormSpec("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True),
        tied=True,
    )
    return with_learned_positions(spec, fields.count("max_position_embeddings"))


def _scaled(spec: DecoderSpec, index: int) -> LayerSpec:
    """Return the layer at `index` with its attention scores divided by its number, counted from 1."""
    changed = spec.with_sublayers(
        lambda one: replace(one, scale=one.scale / (index + 1)) if isinstance(one, SelfAttentionSpec) else one
    )
    return changed.layers[index]


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of other families. Files do not record the activation: GPT-2 has
    gelu_new, and the published StarCoder models have gelu."""
    is_gpt2 = settings.architecture == "gpt2"
    if not is_gpt2 and config["num_key_value_heads"] != 1:
        raise unsupported(
            "num_key_value_heads", config["num_key_value_heads"], "Use a model whose heads share one key."
        )
    return {
        "activation_function": "gelu_new" if is_gpt2 else "gelu",
        "layer_norm_epsilon": settings.number(".attention.layer_norm_epsilon", 1e-5),
        "n_inner": config["intermediate_size"],
    }


GGUF_GPT2 = GGUFFamily("gpt2", "GPT2LMHeadModel", _own)
GGUF_STARCODER = GGUFFamily("starcoder", "GPTBigCodeForCausalLM", _own, "gpt_bigcode")


FAMILIES: dict[str, Describe] = {
    "GPT2LMHeadModel": describe_gpt2,
    "GPTBigCodeForCausalLM": describe_gpt_bigcode,
}
GGUF_FAMILIES = (
    GGUF_GPT2,
    GGUF_STARCODER,
)
