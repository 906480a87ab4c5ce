"""BERT (Devlin et al., 2018), RoBERTa and XLM-RoBERTa: learned positions, norms after each sublayer. Torch-free."""

from oarlock.base.errors import StartupError
from oarlock.workers.models.encoders.encoder_spec import (
    ClassifierSpec,
    EncoderNames,
    EncoderSpec,
    LayerNames,
    num_labels,
    shape_of,
)
from oarlock.workers.models.hf_config import GELUS
from oarlock.workers.models.hf_fields import Fields

_NAMES = EncoderNames(
    word_embeddings="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    layer=LayerNames(
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        attention_output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        mlp_input="intermediate.dense",
        mlp_output="output.dense",
        mlp_norm="output.LayerNorm",
    ),
)


def describe_bert(fields: Fields, *, scores: bool) -> EncoderSpec:
    """Describe BERT.

    `scores`: whether it has a classification head, which reads the first token through BERT's pooler, the dense layer
    that BERT was trained with.
    """
    head = ClassifierSpec("bert.pooler.dense", "classifier", num_labels(fields), "tanh") if scores else None
    return _describe(fields, "bert.", 0, head)


def describe_roberta(fields: Fields, *, scores: bool) -> EncoderSpec:
    """Describe RoBERTa. Positions start after the padding id. `scores`: whether it has a classification head, which has
    its own dense layer."""
    head = ClassifierSpec("classifier.dense", "classifier.out_proj", num_labels(fields), "tanh") if scores else None
    return _describe(fields, "roberta.", fields.count("pad_token_id", 1, least=0) + 1, head)


def _describe(fields: Fields, prefix: str, first_position: int, classifier: ClassifierSpec | None) -> EncoderSpec:
    fields.choice("position_embedding_type", "absolute", {"absolute": "absolute"})
    rows = fields.count("max_position_embeddings", 512)
    if rows <= first_position:
        raise StartupError(
            f"config.json: max_position_embeddings {rows} leaves no position, as the first is {first_position}.",
            "Repair config.json.",
        )
    return EncoderSpec(
        **shape_of(fields),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        max_positions=rows - first_position,
        activation=fields.choice("hidden_act", "gelu", GELUS),
        names=_NAMES,
        prefix=prefix,
        first_position=first_position,
        num_token_types=fields.count("type_vocab_size", 2),
        classifier=classifier,
    )
