"""GPT-Neo: learned positions, scores that are not scaled, and a window in every second layer. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads, with_learned_positions
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_LAYER = "model.layers.*"
_TOP = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm", "h.*": _LAYER}
_IN_LAYER = {
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.attention": "self_attn",
    "attn.attention.out_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
}  # fmt: skip
_USUAL = ["global", "local"]
_MASKS = ("transformer.h.*.attn.attention.bias", "transformer.h.*.attn.attention.masked_bias")  # of old checkpoints
_NAMES = TensorNames(
    prefixes={"transformer.": ""},
    modules=_TOP | {f"h.*.{stored}": f"{_LAYER}.{ours}" for stored, ours in _IN_LAYER.items()},
    ignored=_MASKS,
)


def describe_gpt_neo(fields: Fields) -> DecoderSpec:
    fields = fields.renamed({"num_layers": ("num_hidden_layers", 24), "num_heads": ("num_attention_heads", 16)})
    fields = fields.renamed({"intermediate_size": ("intermediate_size", 4 * fields.count("hidden_size"))})
    fields.check_value("num_key_value_heads", fields.count("num_attention_heads"))
    window = fields.count("window_size", 256)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=whole_heads(fields),
        max_positions=2048,
        windows=tuple(window if kind == "local" else None for kind in _kinds(fields)),
        query_scalar=1.0,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=activation_name(fields, "activation_function", "gelu_new", gated=False),
        norm=NormSpec("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True),
        tied=True,
    )
    return replace(with_learned_positions(spec, fields.count("max_position_embeddings", 2048)), names=_NAMES)


def _kinds(fields: Fields) -> list[str]:
    """Return `local` or `global` for each layer."""
    layers, kinds = fields.layers(), fields.raw.get("attention_layers")
    if kinds is None:
        kinds, types = _USUAL * (layers // 2), fields.raw.get("attention_types")
        if types not in (None, [[_USUAL, layers // 2]]):
            raise unsupported("attention_types", types, "Give attention_layers as well, with the kind of each layer.")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _USUAL for kind in kinds):
        raise unsupported("attention_layers", kinds, f"{' or '.join(_USUAL)} for each of {layers} num_hidden_layers.")
    return kinds


FAMILIES: dict[str, Describe] = {
    "GPTNeoForCausalLM": describe_gpt_neo,
}
