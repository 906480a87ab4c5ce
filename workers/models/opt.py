"""OPT: learned positions that begin at row 2, LayerNorm and an MLP without a gate. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads, with_learned_positions
from oarlock.workers.models.hf_fields import Fields, unsupported

_LAYER = "model.layers.*"
_IN_LAYER = {
    "self_attn.out_proj": "self_attn.o_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj",
    "self_attn_layer_norm": "input_layernorm", "final_layer_norm": "post_attention_layernorm",
}  # fmt: skip
_NAMES = TensorNames(
    prefixes={"model.decoder.": "model.", "decoder.": "model."},
    modules={f"{_LAYER}.{stored}": f"{_LAYER}.{ours}" for stored, ours in _IN_LAYER.items()}
    | {"model.final_layer_norm": "model.norm"},
    ignored=("model.decoder.version", "decoder.version"),
)
_FIRST_ROW = 2  # row of position 0


def describe_opt(fields: Fields) -> DecoderSpec:
    """Describe OPT. The 350M model, which norms the residual after each sublayer and projects its embedding, is
    refused."""
    if not fields.flag("do_layer_norm_before", True):
        raise unsupported("do_layer_norm_before", False, "Use another size of OPT: only 350M norms the residual.")
    if fields.flag("_remove_final_layer_norm", False):
        raise unsupported("_remove_final_layer_norm", True, "Use a model with a norm after the last layer.")
    fields = fields.renamed({"ffn_dim": ("intermediate_size", 3072)})
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.check_value("word_embed_proj_dim", hidden)
    fields.check_value("num_key_value_heads", heads)
    bias, is_affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=whole_heads(fields),
        max_positions=2048,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=activation_name(fields, "activation_function", "relu", gated=False),
        norm=NormSpec("layer", 1e-5, bias=is_affine, weight=is_affine),
        tied=True,
    )
    length = fields.count("max_position_embeddings", 2048)
    return replace(with_learned_positions(spec, length, _FIRST_ROW), names=_NAMES)
