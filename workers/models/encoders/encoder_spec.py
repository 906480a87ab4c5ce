"""Specification of an encoder: all values that determine its computation, and the names of its tensors. Torch-free."""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.models.hf_config import declared_dtype
from oarlock.workers.models.hf_fields import MOST_LABELS, Fields, unsupported, wrong


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Modules of one layer, without the prefix of the layer."""

    query: str  # query, key and value have the same name if one matrix holds all of them, concatenated by rows
    key: str
    value: str
    attention_output: str
    attention_norm: str
    mlp_input: str  # a gated MLP has the gate's rows first
    mlp_output: str
    mlp_norm: str


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Modules of a family's checkpoints, without the common prefix."""

    word_embeddings: str
    embedding_norm: str
    layers: str  # prefix of the layer's index
    layer: LayerNames
    positions: str = ""
    types: str = ""
    final_norm: str = ""


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """Classification head, which scores a text by the hidden state of its first token, or by the mean of all.

    It computes `activation(dense)`, an optional norm, and a linear layer. Its tensors have no common prefix.
    """

    dense: str
    output: str
    num_labels: int
    activation: str  # tanh | gelu | gelu_tanh
    mean: bool = False  # True: of all tokens; False: of the first token
    dense_bias: bool = True
    norm: str = ""
    norm_bias: bool = False


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One encoder-only transformer with LayerNorm, with the layers of BERT or of ModernBERT."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    norm_eps: float
    max_positions: int  # tokens of one text
    activation: str  # gelu | gelu_tanh
    names: EncoderNames
    prefix: str = ""  # prefix of all names of a checkpoint except the classifier's
    dtype: str | None = None  # dtype of the checkpoint
    # BERT: learned positions, norms after each sublayer.
    first_position: int | None = None  # row of the first token among the learned positions; None: rotary
    num_token_types: int = 0
    # ModernBERT: rotary positions, norms before each sublayer, a gated MLP.
    ropes: tuple[RopeSpec, ...] = ()  # rotary embedding of each layer
    # reach of each layer: number of tokens on each side that a token attends to; None: all tokens
    reaches: tuple[int | None, ...] = ()
    pre_norm: bool = False
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    classifier: ClassifierSpec | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_labels(self) -> int:
        return 0 if self.classifier is None else self.classifier.num_labels

    @property
    def num_parameters(self) -> int:
        total = 0
        for shape in self.tensor_shapes().values():
            total += shape[0] * (shape[1] if len(shape) == 2 else 1)
        return total

    def layer_prefix(self, layer: int) -> str:
        return f"{self.prefix}{self.names.layers}.{layer}."

    def with_prefix(self, prefix: str) -> "EncoderSpec":
        return replace(self, prefix=prefix)

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether the layer norms its attention. ModernBERT's first layer reads the output of the embedding's
        norm."""
        return not self.pre_norm or layer > 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and full shape of every tensor."""
        h, names, found = self.hidden_size, self.names, dict[str, tuple[int, ...]]()

        def matrix(name: str, rows: int, inputs: int, bias: bool) -> None:
            found[f"{name}.weight"] = (rows, inputs)
            if bias:
                found[f"{name}.bias"] = (rows,)

        def norm(name: str, bias: bool = self.norm_bias) -> None:
            found.update({f"{name}.weight": (h,)} | ({f"{name}.bias": (h,)} if bias else {}))

        found[f"{self.prefix}{names.word_embeddings}.weight"] = (self.vocab_size, h)
        if self.first_position is not None:
            found[f"{self.prefix}{names.positions}.weight"] = (self.first_position + self.max_positions, h)
        if self.num_token_types:
            found[f"{self.prefix}{names.types}.weight"] = (self.num_token_types, h)
        norm(self.prefix + names.embedding_norm)
        inner = self.intermediate_size * (2 if self.gated else 1)
        for layer in range(self.num_layers):
            before, own = self.layer_prefix(layer), names.layer
            if own.query == own.key:
                matrix(before + own.query, 3 * h, h, self.attention_bias)
            else:
                for part in (own.query, own.key, own.value):
                    matrix(before + part, h, h, self.attention_bias)
            matrix(before + own.attention_output, h, h, self.attention_bias)
            matrix(before + own.mlp_input, inner, h, self.mlp_bias)
            matrix(before + own.mlp_output, h, self.intermediate_size, self.mlp_bias)
            norm(before + own.mlp_norm)
            if self.has_attention_norm(layer):
                norm(before + own.attention_norm)
        if names.final_norm:
            norm(self.prefix + names.final_norm)
        if (head := self.classifier) is not None:
            matrix(head.dense, h, h, head.dense_bias)
            matrix(head.output, head.num_labels, h, True)
            if head.norm:
                norm(head.norm, head.norm_bias)
        return found


def shape_of(fields: Fields) -> dict[str, Any]:
    """Return the fields of `EncoderSpec` that all families share."""
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
    """Return the number of outputs of the classification head."""
    names = fields.raw.get("id2label")
    count = len(names) if isinstance(names, dict) else fields.raw.get("num_labels", 2)
    if type(count) is not int or not 1 <= count <= MOST_LABELS:
        raise wrong("id2label", f"a table of 1 to {MOST_LABELS} labels", count)
    return count
