"""Descriptions of stored tensors and of norms, from which sublayers are put together. Torch-free."""

from dataclasses import dataclass
from enum import Enum, auto

from oarlock.workers.layers.sharding import shard_vocab, shard_width


class Cut(Enum):
    """How the ranks of a group share a tensor."""

    NONE = auto()  # every rank holds all of it
    OUTPUTS = auto()  # by rows
    INPUTS = auto()  # by columns, whose products the ranks add up
    COPIES = auto()  # every rank holds it once for each of its parts
    VOCABULARY = auto()  # by rows, one for each id: see `shard_vocab`
    WIDTH_OUTPUTS = auto()  # by rows, filled up with zeros so that ranks hold whole slices: see `shard_width`
    WIDTH_INPUTS = auto()  # by columns, likewise


class Kept(Enum):
    """The type that a rank keeps a tensor's numbers in."""

    AS_MODEL = auto()  # in the model's type, or in the form that weights are rounded to
    FOR_KERNELS = auto()  # in float32 where kernels of the CPU read it, else in the model's type
    FLOAT32 = auto()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an ordinary checkpoint: its full shape, and what each rank holds of it."""

    name: str  # behind the name of its module, such as `q_proj.weight`
    shape: tuple[int, ...]
    cut: Cut = Cut.NONE
    parts: int = 1  # equal parts, of which a rank holds whole ones; with fewer than ranks, neighbours hold the same one
    kept: Kept = Kept.AS_MODEL
    expert: int | None = None  # of the routed experts, the one that it belongs to, of
    experts: int = 0
    used: float = 1.0  # share of all tokens that are computed with it

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    def local_shape(self, size: int, slices: int = 1, unit: int = 1) -> tuple[int, ...]:
        """Shape of the part that each of `size` ranks holds. `slices` and `unit`: as `shard_width` has them."""
        first, *rest = self.shape
        if self.cut is Cut.WIDTH_OUTPUTS:
            return (shard_width(first, unit, 0, size, slices).count, *rest)
        if self.cut is Cut.WIDTH_INPUTS:
            return (first, shard_width(rest[0], unit, 0, size, slices).count)
        held = max(1, self.parts // size)
        if self.cut is Cut.VOCABULARY:
            return (shard_vocab(first, 0, size)[1], *rest)
        if self.cut is Cut.OUTPUTS:
            return (first // self.parts * held, *rest)
        if self.cut is Cut.COPIES:
            return (first * held, *rest)
        if self.cut is Cut.INPUTS:
            return (first, self.shape[1] // self.parts * held)
        return self.shape


class Made(Enum):
    """How a tensor is made: what can be wrong with it follows."""

    NORM = auto()
    PROJECTION = auto()  # a product whose outputs ranks share
    ROTATION = auto()  # of a projection, perhaps normed before
    ATTENTION = auto()
    GATED = auto()  # activation(gate) * up
    SUM = auto()  # a product whose inputs ranks share
    LOGITS = auto()  # of a router, which every rank computes
    ROUTING = auto()  # the weight of each expert for a token, 0 of one that it does not get
    EXPERTS = auto()  # the sum over ranks of a token's experts, or of the shared expert
    RESIDUAL = auto()


@dataclass(frozen=True, slots=True)
class Tap:
    """A tensor that a verification records on every rank, and compares with that of transformers' module."""

    name: str
    made: Made
    module: str = ""  # the product, in the sublayer, whose result it is; a norm; of a rotation, the norm before it
    is_input: bool = False  # it is what `module` reads instead
    width: int = 0  # numbers of a token, over all ranks; 0: the hidden size
    parts: int = 0  # equal parts, of which a rank holds whole ones, as of a `TensorSpec`; 0: every rank holds all
    is_compared: bool = True  # else only transformers' is recorded, to find the cause of a difference


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The kind of norm that a model has around its sublayers, and at its end."""

    kind: str = "rms"  # rms | layer
    eps: float = 1e-6
    offset: float = 0.0  # rms: scales by offset + weight
    bias: bool = False  # layer: with a shift

    def tensors(self, name: str, size: int) -> list[TensorSpec]:
        """Tensors of a norm of rows of `size` numbers; `name` ends with a dot, or is empty."""
        kept = Kept.FLOAT32 if self.offset or self.kind == "layer" else Kept.FOR_KERNELS
        weight = TensorSpec(f"{name}weight", (size,), kept=kept)
        return [weight, TensorSpec(f"{name}bias", (size,), kept=kept)] if self.bias else [weight]
