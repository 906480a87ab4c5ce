"""Specification of inputs that each layer gets from the tokens: the table of a model, and the sublayer that adds them.

Torch-free. `layer_input.py` computes both. Gemma 3n calls them per-layer embeddings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oarlock.workers.layers.tensor_spec import (
    Computation,
    DividedEvenly,
    NormSpec,
    Sharding,
    Tap,
    TensorSpec,
    WithoutContext,
)


@dataclass(frozen=True, slots=True)
class LayerInputTable:
    """An embedding whose rows hold `width` values for each layer, and a projection of the usual embedding to as many.

    A layer's input is the sum of its part of both, the second of them normed, divided by the square root of 2.
    """

    vocab_size: int
    width: int  # values per token and layer
    norm: NormSpec

    table: ClassVar[str] = "model.embed_tokens_per_layer"
    projection: ClassVar[str] = "model.per_layer_model_projection"
    projection_norm: ClassVar[str] = "model.per_layer_projection_norm"
    modules: ClassVar[tuple[str, ...]] = (table, projection, projection_norm)

    def tensors(self, hidden: int, layers: int) -> list[TensorSpec]:
        """Return the tensors of a model of `layers` layers, by their full names."""
        values = layers * self.width
        return [
            TensorSpec(f"{self.table}.weight", (self.vocab_size, values), Sharding.VOCABULARY, used=0.0),
            TensorSpec(f"{self.projection}.weight", (values, hidden)),
            *self.norm.tensors(f"{self.projection_norm}.", self.width),
        ]


@dataclass(frozen=True, slots=True)
class LayerInputSpec(DividedEvenly, WithoutContext):
    """The sublayer `down(activation(gate(x)) * input)`, where `input` is the layer's own input of each token."""

    width: int  # values per token of the layer's input
    activation: str  # a key of `PLAIN_ACTIVATIONS` in `quantization/matmul.py`

    module: ClassVar[str] = "per_layer_input"
    title: ClassVar[str] = "layer input"
    reads: ClassVar[str] = "layer_input_norm"  # names, in a verification, of its input and of the residual after it
    leaves: ClassVar[str] = "layer_input_residual"
    # GGUF names of the modules, and of the norms before and after the sublayer.
    gguf: ClassVar[Mapping[str, str]] = {"gate_proj": "inp_gate", "down_proj": "proj"}
    gguf_norms: ClassVar[tuple[str, str]] = ("", "post_norm")
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @property
    def memory(self) -> None:
        """Nothing is kept of a sequence."""

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return the tensors of an ordinary checkpoint with hidden size `hidden`, with names relative to `module`."""
        return [
            TensorSpec("gate_proj.weight", (self.width, hidden), Sharding.OUTPUTS, self.width),
            TensorSpec("down_proj.weight", (hidden, self.width), Sharding.INPUTS, self.width),
        ]

    @property
    def taps(self) -> list[Tap]:
        """The tensors that a verification compares, in the order of their computation."""
        return [
            Tap("input_gated", Computation.ACTIVATED, "down_proj", True, self.width, self.width),
            Tap("input_added", Computation.SUM, "down_proj"),
        ]

    @property
    def most_ranks(self) -> int:
        return self.width

    @property
    def sizes(self) -> str:
        """The sizes that are divided among ranks, for messages."""
        return f"width {self.width} of layers' inputs"

    @property
    def shared_inputs(self) -> int:
        """Number of inputs of the down projection, which are divided among ranks."""
        return self.width

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} of each layer's"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks."""
        return 2 * self.width // size
