"""The form of one weight: its memory, the method that reads it, and the tensors of a stored one. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, Self

from oarlock.workers.errors import StartupError

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod


class Arithmetic(Enum):
    """Kinds of arithmetic in a product with a weight of some form."""

    DENSE = auto()  # the weight is in the dtype that the model computes in
    EXACT_INPUTS = auto()  # the weight's numbers are widened exactly, and inputs are as they are
    FLOAT8_INPUTS = auto()  # the same on CPUs; on CUDA devices many rows of inputs may be rounded to float8
    ROUNDED_INPUTS = auto()  # rows of inputs are rounded to 8 bits on CPUs; on CUDA devices they are as they are


SCALES = ("F16", "BF16", "F32")  # what scales are stored in


class Form(Protocol):
    """The form of a weight [rows, inputs] in memory."""

    @property
    def method(self) -> Callable[[], LinearMethod]:
        """Makes the method that reads it."""

    @property
    def arithmetic(self) -> Arithmetic: ...

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        """Bytes in memory, in a model that computes in a dtype of `item_bytes`. `slices`: see `LinearWeight.matmul`."""


class WeightForms(Protocol):
    """The forms of all weights of a model."""

    @property
    def of_head(self) -> WeightForms:
        """The forms for the output head, and for an embedding that is its weight."""

    def form_of(self, module: str) -> Form:
        """The form of a linear module's weight. `module`: its name in a checkpoint that does not fuse modules."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint may stay unused."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a stored weight: the shapes and safetensors' dtypes that it may have."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]  # None: any length
    required: bool = True

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(wanted) and all(w in (None, length) for w, length in zip(wanted, shape, strict=True))
            for wanted in self.shapes
        )


def stored(dtypes: tuple[str, ...] | str, *shape: int | None, required: bool = True) -> StoredTensor:
    """A tensor of one shape."""
    return StoredTensor((dtypes,) if isinstance(dtypes, str) else dtypes, (shape,), required)


class StoredForm(Form, Protocol):
    """The form in which a checkpoint stores the weight of one linear module."""

    @property
    def spare(self) -> tuple[str, ...]:
        """Tensors that may be there and need not be read, by what follows the module's name and a dot."""

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Tensors that store the weight, by what follows the module's name and a dot."""

    def check(self, module: str, rows: int, inputs: int) -> None:
        """Raise `StartupError` where a weight of these lengths cannot be stored so."""


class Scheme(Protocol):
    """Description of a checkpoint's weights by its settings."""

    @property
    def description(self) -> str:
        """The scheme in a few words, for people."""

    def form_of(self, module: str) -> StoredForm | None:
        """The stored form of a module's weight; None: the settings leave the module as it was."""


class FormOfEveryModule:
    """`Scheme` of a checkpoint whose modules all have this one form, and no spare tensors."""

    __slots__ = ()
    spare: tuple[str, ...] = ()

    def form_of(self, module: str) -> Self:
        return self


def check_divides(module: str, what: str, length: int, part: int) -> None:
    if length % part:
        raise StartupError(
            f"{module}: {what} of {part} do not divide its {length}.",
            "Use a checkpoint that was quantised for this shape, or the model's unquantised one.",
        )
