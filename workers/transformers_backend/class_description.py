"""Description of a model class that transformers computes: the memory, the tensors and the limits of the model.

Torch-free, so the engine and `oarlock plan` can read it. `inspection.py` makes it, in a process of its own.
"""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The attention of one layer, as its class asks for it. Counts are over all ranks."""

    layer: int
    module: str  # its name in the model
    heads: int
    kv_heads: int
    key_width: int  # values of one head's key
    value_width: int  # values of one head's value
    scale: float | None  # None: one divided by the square root of the key's width
    window: int | None  # latest tokens that a query sees, itself included; None: all
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class StateCall:
    """One tensor of recurrent state that a layer keeps, of one sequence."""

    layer: int
    module: str  # the outermost module that reads and writes it
    number: int  # of the states of this kind in the layer
    shape: tuple[int, ...]  # without the batch; a convolution's last size is its number of taps
    dtype: str
    is_convolution: bool


@dataclass(frozen=True, slots=True)
class ClassTensor:
    """One parameter or stored buffer of the model."""

    name: str
    shape: tuple[int, ...]
    is_linear: bool  # the weight or bias of a plain linear layer
    style: str | None  # how the class's own plan for tensor parallelism divides it; None: it does not


@dataclass(frozen=True, slots=True)
class ClassDescription:
    """What one look at a class on the meta device found. If `refusal` is set, the rest may be empty."""

    architecture: str
    model_type: str
    refusal: str | None = None  # one line: why the class is not served
    layers: int = 0
    vocab_size: int = 0
    hidden_size: int = 0
    longest_length: int = 0  # tokens; 0: the config has no limit
    is_tied: bool = False  # the output head is the embedding
    has_plan: bool = False  # the class has a plan for tensor parallelism; without one every rank holds all weights
    attention: tuple[AttentionCall, ...] = ()
    states: tuple[StateCall, ...] = ()
    tensors: tuple[ClassTensor, ...] = ()

    def encoded(self) -> bytes:
        """Return the description as JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def decoded(text: bytes) -> "ClassDescription":
        """Return the description in `text`. Raise `msgspec.ValidationError` if it is none."""
        return msgspec.json.decode(text, type=ClassDescription)
