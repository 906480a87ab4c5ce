"""Descriptions of stored tensors, norms and sublayers, from which specifications are built. Torch-free."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

from oarlock.workers.layers.sharding import shard_vocab, shard_width


class Sharding(Enum):
    """Ways to divide a tensor among the ranks of a group."""

    NONE = auto()  # every rank holds the whole tensor
    OUTPUTS = auto()  # split by rows
    INPUTS = auto()  # split by columns; the ranks all-reduce the partial sums
    COPIES = auto()  # every rank holds one copy for each of its parts
    VOCABULARY = auto()  # split by rows, one row for each token id; see `shard_vocab`
    WIDTH_OUTPUTS = auto()  # split by rows, padded with zeros so that ranks hold whole slices; see `shard_width`
    WIDTH_INPUTS = auto()  # split by columns, padded in the same manner


class RankDtype(Enum):
    """The dtype in which a rank keeps a tensor."""

    AS_MODEL = auto()  # the model's dtype, or the format that the weights are quantized to
    FOR_KERNELS = auto()  # float32 if the CPU kernels read the tensor, else the model's dtype
    FLOAT32 = auto()
    UNQUANTIZED = auto()  # the model's dtype, also if weights are quantized at load
    DEQUANTIZED = auto()  # the same, and also if the checkpoint stores it quantized; adapters cannot update it


NOT_QUANTIZED = (RankDtype.UNQUANTIZED, RankDtype.DEQUANTIZED)  # dtypes of matrices that are not quantized at load


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an ordinary checkpoint: its full shape, and how the ranks divide it."""

    name: str  # relative to the name of its module, such as `q_proj.weight`
    shape: tuple[int, ...]
    sharding: Sharding = Sharding.NONE
    # number of equal parts; ranks hold whole parts, and neighbouring ranks share a part if parts < ranks
    parts: int = 1
    rank_dtype: RankDtype = RankDtype.AS_MODEL
    expert: int | None = None  # index of the routed expert that it belongs to
    experts: int = 0  # number of routed experts
    used: float = 1.0  # fraction of all tokens that use it
    is_table: bool = False  # its rows are looked up; it is never multiplied, and never quantized

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and not self.is_table

    def local_shape(self, size: int, slices: int = 1, unit: int = 1) -> tuple[int, ...]:
        """Return the shape of the part that each of `size` ranks holds; `slices` and `unit` are passed to
        `shard_width`."""
        if not self.shape:  # a scalar
            return ()
        first, *rest = self.shape
        if self.sharding is Sharding.WIDTH_OUTPUTS:
            return (shard_width(first, unit, 0, size, slices).count, *rest)
        if self.sharding is Sharding.WIDTH_INPUTS:
            return (first, shard_width(rest[0], unit, 0, size, slices).count)
        held = max(1, self.parts // size)
        if self.sharding is Sharding.VOCABULARY:
            return (shard_vocab(first, 0, size)[1], *rest)
        if self.sharding is Sharding.OUTPUTS:
            # axes of length 1 before the parts, as some checkpoints have around one value of each head
            ones = next((axis for axis, length in enumerate(self.shape) if length > 1), 0) if self.parts > 1 else 0
            return (*self.shape[:ones], self.shape[ones] // self.parts * held, *self.shape[ones + 1 :])
        if self.sharding is Sharding.COPIES:
            return (first * held, *rest)
        if self.sharding is Sharding.INPUTS:
            return (first, self.shape[1] // self.parts * held)
        return self.shape


class Computation(Enum):
    """Computations that produce a tensor. The kind determines which errors are possible."""

    NORM = auto()
    PROJECTION = auto()  # a matmul whose outputs are split among ranks
    ROTATION = auto()  # rotary embedding of a projection, which may be normed first
    ATTENTION = auto()
    GATED = auto()  # activation(gate) * up
    ACTIVATED = auto()  # activation(up)
    CONVOLUTION = auto()  # the causal convolution of projections, with its activation or its gates
    RECURRENCE = auto()  # the result of a recurrence over a state
    GATED_NORM = auto()  # the gated norm of a recurrence's result
    SUM = auto()  # a matmul whose inputs are split among ranks, after the all-reduce
    LOGITS = auto()  # the router's logits, which every rank computes
    ROUTING = auto()  # the weight of each expert for a token; 0 for experts that were not chosen
    EXPERTS = auto()  # the sum of a token's routed experts, or the shared expert, after the all-reduce
    RESIDUAL = auto()


@dataclass(frozen=True, slots=True)
class Tap:
    """A tensor that a verification records on every rank and compares with the output of transformers' module."""

    name: str
    computation: Computation
    module: str = ""  # linear layer or norm in the sublayer that returns the tensor; for a rotation, the norm before it
    is_input: bool = False  # True: the tensor is the input of `module`, not its output
    width: int = 0  # values per token over all ranks; 0: the hidden size
    parts: int = 0  # number of equal parts, as in `TensorSpec`; 0: every rank holds the whole tensor
    factor: float = 1.0  # our tensor divided by transformers'
    is_compared: bool = True  # False: only transformers' tensor is recorded, to find the cause of a difference
    roundings: int = 1  # roundings of our values on the way from the compared tensors before it
    reads: str = ""  # tensor of the same sublayer that `module` multiplies; empty: the sublayer's input


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The kind of norm that a model has around its sublayers and after its last layer."""

    kind: str = "rms"  # rms | layer
    eps: float = 1e-6
    offset: float = 0.0  # multiplies by offset + weight
    bias: bool = False  # layer: has a bias vector
    weight: bool = True  # False: the norm does not scale its results

    def tensors(self, name: str, size: int) -> list[TensorSpec]:
        """Return the tensors of a norm over rows of `size` values. `name` ends with a dot or is empty."""
        rank_dtype = RankDtype.FLOAT32 if self.offset or self.kind == "layer" else RankDtype.FOR_KERNELS
        kinds = [kind for kind, is_there in (("weight", self.weight), ("bias", self.bias)) if is_there]
        return [TensorSpec(f"{name}{kind}", (size,), rank_dtype=rank_dtype) for kind in kinds]


class WithoutContext:
    """Parts of the specification of a sublayer that reads no keys and values of earlier tokens."""

    __slots__ = ()

    @property
    def pair_ops(self) -> int:
        """Multiplications and additions of a token for each token of its context: none."""
        return 0

    def for_length(self, length: int) -> Self:
        """Return the same specification: it does not depend on `length`."""
        return self


class DividedEvenly(ABC):
    """Parts of the specification of a sublayer whose heads, channels or columns are divided equally among ranks."""

    __slots__ = ()

    @property
    @abstractmethod
    def most_ranks(self) -> int:
        """The number of heads, channels or columns, and so the most ranks that can share the sublayer."""

    def divides(self, size: int) -> bool:
        """Return whether `size` ranks can share the sublayer."""
        return self.most_ranks % size == 0
