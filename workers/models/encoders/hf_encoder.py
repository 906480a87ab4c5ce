"""The settings of a `config.json` that all families of encoders share, with transformers' defaults. Torch-free."""

from typing import Any

from oarlock.workers.errors import StartupError
from oarlock.workers.models.hf_config import declared_dtype
from oarlock.workers.models.hf_fields import MOST_LABELS, Fields, unsupported, wrong

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def shape_of(fields: Fields) -> dict[str, Any]:
    """Fields of `EncoderSpec`."""
    fields.refuse_the_rest()
    if fields.flag("is_decoder", False):
        raise unsupported("is_decoder", True, "This architecture is served only as an encoder.")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise StartupError(
            f"config.json: hidden_size {hidden} cannot be divided among {heads} attention heads.",
            "Repair hidden_size or num_attention_heads.",
        )
    return {
        "architecture": fields.raw["architectures"][0],
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden,
        "num_layers": fields.layers(),
        "num_heads": heads,
        "intermediate_size": fields.count("intermediate_size"),
        "dtype": declared_dtype(fields.raw),
    }


def num_labels(fields: Fields) -> int:
    """Number of outputs of the classification head."""
    names = fields.raw.get("id2label")
    count = len(names) if isinstance(names, dict) else fields.raw.get("num_labels", 2)
    if type(count) is not int or not 1 <= count <= MOST_LABELS:
        raise wrong("id2label", f"a table of 1 to {MOST_LABELS} labels", count)
    return count
