"""ModernBERT (Warner et al., 2024): rotary positions, norms before each sublayer, a gated MLP, and local attention in
most layers. Torch-free."""

from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.models.encoders.encoder_spec import (
    ClassifierSpec,
    EncoderNames,
    EncoderSpec,
    LayerNames,
    num_labels,
    shape_of,
)
from oarlock.workers.models.hf_config import GELUS, layer_kinds
from oarlock.workers.models.hf_fields import Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_NAMES = EncoderNames(
    word_embeddings="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layers="layers",
    layer=LayerNames(
        query="attn.Wqkv",
        key="attn.Wqkv",
        value="attn.Wqkv",
        attention_output="attn.Wo",
        attention_norm="attn_norm",
        mlp_input="mlp.Wi",
        mlp_output="mlp.Wo",
        mlp_norm="mlp_norm",
    ),
    final_norm="final_norm",
)
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
_EVERY = "global_attn_every_n_layers"


def describe_modernbert(fields: Fields, *, scores: bool) -> EncoderSpec:
    """Describe ModernBERT. `scores`: whether the checkpoint has a classification head."""
    shape, norm_bias = shape_of(fields), fields.flag("norm_bias", False)
    every, positions = fields.count(_EVERY, 3), fields.count("max_position_embeddings", 8192)
    kinds = layer_kinds(fields) or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(shape["num_layers"])
    ]
    reach = fields.count("local_attention", 128) // 2
    ropes = {kind: _rope(fields, kind, shape["hidden_size"] // shape["num_heads"], positions) for kind in set(kinds)}
    head = None
    if scores:
        head = ClassifierSpec(
            "head.dense",
            "classifier",
            num_labels(fields),
            fields.choice("classifier_activation", "gelu", GELUS),
            mean=fields.choice("classifier_pooling", "cls", {"cls": "cls", "mean": "mean"}) == "mean",
            dense_bias=fields.flag("classifier_bias", False),
            norm="head.norm",
            norm_bias=norm_bias,
        )
    return EncoderSpec(
        **shape,
        norm_eps=fields.number("norm_eps", 1e-5),
        max_positions=positions,
        activation=fields.choice("hidden_activation", "gelu", GELUS),
        names=_NAMES,
        prefix="model.",
        ropes=tuple(ropes[kind] for kind in kinds),
        reaches=tuple(reach if kind == "sliding_attention" else None for kind in kinds),
        pre_norm=True,
        gated=True,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_bias=norm_bias,
        classifier=head,
    )


def _rope(fields: Fields, kind: str, head_dim: int, positions: int) -> RopeSpec:
    """Return the rotary embedding of layers of this kind. Newer configs have a table for each kind, older configs a
    number."""
    key, default = _THETAS[kind]
    table: Any = fields.table("rope_parameters").get(kind)
    if table is None:
        table = {"rope_theta": fields.number(key, default)}
    if not isinstance(table, dict):
        raise unsupported("rope_parameters", table, "It must be a table for each kind of layer.")
    spec = rope_spec({"rope_theta": default, **table}, head_dim, positions)
    if spec.kind != "default":
        raise unsupported("rope type", spec.kind, "Encoders are served with the default rotation.")
    return spec
