"""OPT and BioGPT: learned positions that begin at row 2, LayerNorm and an MLP without a gate. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import activation_name, decoder_spec, whole_heads, with_learned_positions
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_LAYER = "model.layers.*"
_IN_LAYER = {
    "self_attn.out_proj": "self_attn.o_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj",
    "self_attn_layer_norm": "input_layernorm", "final_layer_norm": "post_attention_layernorm",
}  # fmt: skip
_MODULES = {f"{_LAYER}.{stored}": f"{_LAYER}.{ours}" for stored, ours in _IN_LAYER.items()}
_OPT = TensorNames(
    prefixes={"model.decoder.": "model.", "decoder.": "model."},
    modules=_MODULES | {"model.final_layer_norm": "model.norm"},
    ignored=("model.decoder.version", "decoder.version"),
)
_BIOGPT = TensorNames(
    prefixes={"biogpt.": "model."},
    modules=_MODULES | {"model.layer_norm": "model.norm", "output_projection": "lm_head"},
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
    fields.check_value("word_embed_proj_dim", fields.count("hidden_size"))
    bias, is_affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    norm = NormSpec("layer", 1e-5, bias=is_affine, weight=is_affine)
    activation = activation_name(fields, "activation_function", "relu", gated=False)
    return replace(_described(fields, activation, norm, bias=bias, length=2048), names=_OPT)


def describe_biogpt(fields: Fields) -> DecoderSpec:
    """Describe BioGPT, whose norms do not use `layer_norm_eps` of its config."""
    scale = fields.count("hidden_size") ** 0.5 if fields.flag("scale_embedding", True) else 1.0
    activation = activation_name(fields, "hidden_act", "gelu", gated=False)
    spec = _described(fields, activation, NormSpec("layer", 1e-5, bias=True), bias=True, length=1024)
    return replace(spec, embedding_scale=scale, names=_BIOGPT)


def _described(fields: Fields, activation: str, norm: NormSpec, *, bias: bool, length: int) -> DecoderSpec:
    """Return the description that both share. `length`: default of the context."""
    fields.check_value("num_key_value_heads", fields.count("num_attention_heads"))
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=whole_heads(fields),
        max_positions=length,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=activation,
        norm=norm,
        tied=True,
    )
    return with_learned_positions(spec, fields.count("max_position_embeddings", length), _FIRST_ROW)


FAMILIES: dict[str, Describe] = {
    "BioGptForCausalLM": describe_biogpt,
    "OPTForCausalLM": describe_opt,
}
