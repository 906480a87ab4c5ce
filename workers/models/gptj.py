"""GPT-J: attention and an MLP without a gate in parallel, rotary embedding of neighbours, a biased head. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_KEYS = {
    "n_embd": ("hidden_size", 4096), "n_layer": ("num_hidden_layers", 28), "n_head": ("num_attention_heads", 16),
    "n_positions": ("max_position_embeddings", 2048),
}  # fmt: skip
_LAYER = "model.layers.*"
_IN_LAYER = {
    "ln_1": "input_layernorm", "attn": "self_attn", "attn.out_proj": "self_attn.o_proj",
    "mlp.fc_in": "mlp.up_proj", "mlp.fc_out": "mlp.down_proj",
}  # fmt: skip
_NAMES = TensorNames(
    prefixes={"transformer.": ""},
    modules={"wte": "model.embed_tokens", "ln_f": "model.norm", "h.*": _LAYER}
    | {f"h.*.{stored}": f"{_LAYER}.{ours}" for stored, ours in _IN_LAYER.items()},
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),  # masks of old checkpoints
)
_ONE_NORM = (("input_layernorm", None), ("input_layernorm", None))


def describe_gptj(fields: Fields) -> DecoderSpec:
    fields = fields.renamed(_KEYS)
    fields = fields.renamed({"n_inner": ("intermediate_size", 4 * fields.count("hidden_size"))})
    fields.check_value("num_key_value_heads", fields.count("num_attention_heads"))
    width = whole_heads(fields)
    # transformers ignores the rotary settings of other families. A scaling is refused: its users expect an effect.
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    if table:
        raise unsupported("rope type", table.get("rope_type", table.get("type")), "GPT-J's positions are not scaled.")
    rotated = fields.count("rotary_dim", 64)
    if rotated % 2 or rotated > width or fields.raw.get("rotary_dim", rotated) is None:
        value = fields.raw.get("rotary_dim", rotated)
        raise unsupported("rotary_dim", value, f"It must be even, and at most head_dim, which is {width}.")
    rope = rope_spec({"rope_theta": 10000.0}, rotated, fields.count("max_position_embeddings"))
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=width,
        max_positions=2048,
        windows=(None,) * fields.layers(),
        rope=replace(rope, interleaved=True),
        mlp_bias=True,
        gated_mlp=False,
        activation=activation_name(fields, "activation_function", "gelu_new", gated=False),
        norm=NormSpec("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True),
        norms=_ONE_NORM,
        parallel=True,
    )
    return replace(spec, head_bias=True, names=_NAMES)


FAMILIES: dict[str, Describe] = {
    "GPTJForCausalLM": describe_gptj,
}
