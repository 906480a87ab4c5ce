"""Registry of supported encoders, and the `EncoderSpec` of a model directory. Torch-free."""

from pathlib import Path
from typing import Any, Protocol

from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.models.encoders.bert import describe_bert, describe_roberta
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.models.encoders.modernbert import describe_modernbert
from oarlock.workers.models.hf_fields import Fields, read_config


class _Describe(Protocol):
    def __call__(self, fields: Fields, *, scores: bool) -> EncoderSpec: ...


_FAMILIES: dict[str, _Describe] = {
    "Bert": describe_bert,
    "Roberta": describe_roberta,
    "XLMRoberta": describe_roberta,
    "Camembert": describe_roberta,
    "ModernBert": describe_modernbert,
}
_SCORES = "ForSequenceClassification"
_ENDS = ("Model", "ForMaskedLM", _SCORES)  # suffixes: bare encoder, or with a head; only the last head is used
ENCODERS = {f"{family}{end}": family for family in _FAMILIES for end in _ENDS}


def is_scored(architecture: str) -> bool:
    """Return whether an encoder with this name of its class has a head that scores text."""
    return architecture.endswith(_SCORES)


def is_encoder(hf_config: dict[str, Any]) -> bool:
    """Return whether a parsed `config.json` describes a supported encoder."""
    names = hf_config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0] in ENCODERS


def describe_encoder(hf_config: dict[str, Any]) -> EncoderSpec:
    """Describe the encoder of a `config.json` that passes `is_encoder`. Raise `StartupError` if it is not supported."""
    name = hf_config["architectures"][0]
    return _FAMILIES[ENCODERS[name]](Fields(hf_config), scores=is_scored(name))


def read_encoder(model_path: str, checkpoint: Checkpoint | None) -> EncoderSpec:
    """Return the encoder in `model_path`. Checkpoints of the bare model have names without the family's prefix.

    `checkpoint`: None for dummy weights.
    """
    spec = describe_encoder(read_config(Path(model_path)))
    if checkpoint is None or checkpoint.find(f"{spec.prefix}{spec.names.word_embeddings}.weight") is not None:
        return spec
    return spec.with_prefix("")


def is_ignorable(spec: EncoderSpec, name: str) -> bool:
    """Return whether a tensor of the checkpoint may stay unused: heads of tasks that are not served, and buffers."""
    own = name.removeprefix(spec.prefix)
    if own in ("embeddings.position_ids", "embeddings.token_type_ids") or own.startswith("pooler."):
        return True
    is_of_head = name.startswith(("cls.", "lm_head.", "head.", "decoder."))
    return spec.classifier is None and is_of_head
