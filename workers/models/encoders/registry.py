"""Registry of the encoders that are served, and the `EncoderSpec` that a model directory means. Torch-free."""

from pathlib import Path
from typing import Any, Protocol

from oarlock.workers.models.encoders.bert import describe_bert, describe_roberta
from oarlock.workers.models.encoders.encoder_spec import EncoderSpec
from oarlock.workers.models.encoders.modernbert import describe_modernbert
from oarlock.workers.models.hf_fields import Fields, read_config
from oarlock.workers.weights.checkpoint import Checkpoint


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
_ENDS = ("Model", "ForMaskedLM", _SCORES)  # of an encoder alone, or with a head of which only the last is used
ENCODERS = {f"{family}{end}": family for family in _FAMILIES for end in _ENDS}


def is_encoder(hf_config: dict[str, Any]) -> bool:
    """Whether `config.json`, parsed, is that of an encoder that is served."""
    names = hf_config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0] in ENCODERS


def describe_encoder(hf_config: dict[str, Any]) -> EncoderSpec:
    """Describes the encoder of a `config.json` for which `is_encoder`. Raises `StartupError` for unserved settings."""
    name = hf_config["architectures"][0]
    return _FAMILIES[ENCODERS[name]](Fields(hf_config), scores=name.endswith(_SCORES))


def read_encoder(model_path: str, checkpoint: Checkpoint | None) -> EncoderSpec:
    """The encoder in `model_path`. Checkpoints of the bare model have names without the family's prefix.

    `checkpoint`: None for dummy weights.
    """
    spec = describe_encoder(read_config(Path(model_path)))
    if checkpoint is None or checkpoint.find(f"{spec.prefix}{spec.names.words}.weight") is not None:
        return spec
    return spec.with_prefix("")


def is_ignorable(spec: EncoderSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint may stay unused: heads for which the model is not served, and buffers."""
    own = name.removeprefix(spec.prefix)
    if own in ("embeddings.position_ids", "embeddings.token_type_ids") or own.startswith("pooler."):
        return True
    is_of_head = name.startswith(("cls.", "lm_head.", "head.", "decoder."))
    return spec.classifier is None and is_of_head
