"""Description of a model class that transformers computes: the memory, the tensors and the limits of the model.

Torch-free, so the engine and `oarlock plan` can read it. `inspection.py` makes it, in a process of its own.
"""

import base64
import json
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

CANNOT_DIVIDE = "it cannot be divided among {} ranks ({})"  # refusal of a number of ranks, with the reason


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
    is_divided: bool = True  # ranks divide its heads; False: each computes them all


@dataclass(frozen=True, slots=True)
class StateCall:
    """One tensor of recurrent state that a layer keeps, of one sequence."""

    layer: int
    module: str  # the outermost module that reads and writes it
    number: int  # of the states of this kind in the layer
    shape: tuple[int, ...]  # without the batch; a convolution's last size is its number of taps
    dtype: str
    is_convolution: bool
    is_divided: bool = False  # ranks divide its first dimension; False: each keeps all of it


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """A module of routed experts that our kernels compute: `down(activation(gate(x)) * up(x))` for each expert."""

    module: str
    experts: int
    hidden: int
    width: int
    top_k: int  # experts of one token
    activation: str  # as in `ExpertsSpec`
    is_gated: bool = True
    has_bias: bool = False
    is_transposed: bool = False  # stored as [experts, inputs, outputs]
    is_concatenated: bool = True  # rows of gate before rows of up; False: they alternate
    is_flat: bool = False  # three matrices [experts * width, hidden], as DBRX has them
    alpha: float = 1.702  # of `clamped_swiglu`, as in `ExpertsSpec`
    limit: float = 7.0
    identities: int = 0  # experts after the others, whose result is their input


# What reads a tensor: a plain linear layer, the token embedding, the output head, experts, or the class's own code.
Role = Literal["linear", "embedding", "head", "experts", "own"]


@dataclass(frozen=True, slots=True)
class ClassTensor:
    """One parameter or stored buffer of the model. A tensor that several modules share appears once."""

    name: str
    shape: tuple[int, ...]
    role: Role
    style: str | None = None  # how the class's own plan for tensor parallelism divides it; None: it does not
    is_float32: bool = False  # kept in float32 whatever the model's dtype is


@dataclass(frozen=True, slots=True)
class Tie:
    """Two tensors that a checkpoint stores, and that the class keeps as one."""

    taken: str  # name of the tensor that is read
    other: str


@dataclass(frozen=True, slots=True)
class ClassDescription:
    """What one look at a class on the meta device found. If `refusal` is set, the rest may be empty."""

    architecture: str
    model_type: str
    refusal: str | None = None  # one line: why the class is not served
    ranks: int = 1  # tensor-parallel size that the look was made for
    config_part: str | None = None  # part of config.json that the class takes; None: all of it
    is_remote: bool = False  # the class is code of the checkpoint
    layers: int = 0
    vocab_size: int = 0
    hidden_size: int = 0
    longest_length: int = 0  # tokens; 0: the config has no limit
    is_tied: bool = False  # the output head is the embedding
    has_plan: bool = False  # the class has a plan for tensor parallelism; without one every rank holds all weights
    attention: tuple[AttentionCall, ...] = ()
    states: tuple[StateCall, ...] = ()
    experts: tuple[ExpertsModule, ...] = ()
    tensors: tuple[ClassTensor, ...] = ()
    ties: tuple[Tie, ...] = ()  # of the checkpoint that was looked at
    own_linears: tuple[str, ...] = ()  # linear layers whose weights the class reads itself, so that it keeps them

    def encoded(self) -> str:
        """Return the description as a short line of ASCII: JSON, compressed.

        The tensors of experts that are stored one by one would not fit into a message to a rank otherwise.
        """
        return base64.b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()

    @staticmethod
    def decoded(text: str) -> "ClassDescription":
        """Return the description that `encoded` wrote as `text`."""
        fields = json.loads(zlib.decompress(base64.b64decode(text)))
        for name, kind in _PARTS.items():
            fields[name] = tuple(kind(**_with_tuples(part)) for part in fields[name])
        return ClassDescription(**_with_tuples(fields))


_PARTS = {
    "attention": AttentionCall,
    "states": StateCall,
    "experts": ExpertsModule,
    "tensors": ClassTensor,
    "ties": Tie,
}


def _with_tuples(part: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in part.items()}
