"""Format of one weight: its memory, its method, the tensors of a stored weight, and the settings. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, Self

from oarlock.base.errors import StartupError

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

SCALES = ("F16", "BF16", "F32")  # dtypes in which scales are stored
USE_ANOTHER = "Use another quantisation of the model, or its bfloat16, float16 or float32 checkpoint."
_LONGEST = 80  # maximum characters of a value in an error


class Arithmetic(Enum):
    """Kinds of arithmetic in a matmul with a weight."""

    DENSE = auto()  # the weight has the model's compute dtype
    EXACT_INPUTS = auto()  # the weight's values are widened exactly, and inputs are unchanged
    # EXACT_INPUTS on CPUs; on CUDA devices inputs of many rows may be rounded to float8.
    FLOAT8_INPUTS = auto()
    FLOAT8_BLOCKS = auto()  # likewise, with each 128 inputs of a row rounded separately
    ROUNDED_INPUTS = auto()  # rows of inputs are rounded to 8 bits on CPUs and unchanged on CUDA devices


class WeightFormat(Protocol):
    """Format of a weight [rows, inputs] in memory."""

    @property
    def method(self) -> Callable[[], LinearMethod]:
        """Factory of the method that reads the weight."""

    @property
    def arithmetic(self) -> Arithmetic: ...

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        """Return the bytes in memory of a model whose compute dtype has `item_bytes` bytes.

        `slices`: see `LinearWeight.matmul`.
        """


_UNIT = 32  # inputs of a group in most formats


def unit_of_width(weight_format: WeightFormat) -> int:
    """Return the number that divides a slice's inputs, so that padding to whole slices cuts no groups."""
    return 1 if weight_format.arithmetic is Arithmetic.DENSE and getattr(weight_format, "group", 1) == 1 else _UNIT


class WeightFormats(Protocol):
    """Formats of all weights of a model."""

    @property
    def of_head(self) -> WeightFormats:
        """Formats of the output head, and of an embedding that is its weight."""

    @property
    def of_gates(self) -> WeightFormats:
        """Formats of projections to the gates of a gated delta net, which are not quantized at load."""

    def format_of(self, module: str) -> WeightFormat:
        """Return the format of a linear module's weight. `module`: its name in a checkpoint that does not fuse
        modules."""

    def ignores(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint may stay unused."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Allowed shapes and safetensors dtypes of one tensor of a stored weight."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]  # None: any length
    required: bool = True

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return any(
            len(shape) == len(wanted) and all(w in (None, length) for w, length in zip(wanted, shape, strict=True))
            for wanted in self.shapes
        )


def stored(dtypes: tuple[str, ...] | str, *shape: int | None, required: bool = True) -> StoredTensor:
    """Return a tensor with one allowed shape."""
    return StoredTensor((dtypes,) if isinstance(dtypes, str) else dtypes, (shape,), required)


class StoredFormat(WeightFormat, Protocol):
    """Format in which a checkpoint stores the weight of one linear module."""

    @property
    def spare(self) -> tuple[str, ...]:
        """Suffixes, after the module's name and a dot, of tensors that may exist and need not be read."""

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Return the tensors that store the weight, by their suffix after the module's name and a dot."""

    def check(self, module: str, rows: int, inputs: int) -> None:
        """Raise `StartupError` if the format cannot store a weight of these lengths."""


class Scheme(Protocol):
    """Quantization of a checkpoint's weights according to its settings."""

    @property
    def description(self) -> str:
        """The scheme in a few words, for people."""

    def format_of(self, module: str) -> StoredFormat | None:
        """Return the stored format of a module's weight, or None if the settings leave the module unquantised."""


class UniformScheme:
    """`Scheme` of a checkpoint whose modules all have this format, without spare tensors."""

    __slots__ = ()
    spare: tuple[str, ...] = ()

    def format_of(self, module: str) -> Self:
        return self


def check_divides(module: str, what: str, length: int, part: int) -> None:
    if length % part:
        raise StartupError(
            f"{module}: {what} of {part} do not divide its {length}.",
            "Use a checkpoint that was quantised for this shape, or the model's unquantised one.",
        )


class QuantizationSettings:
    """One table of quantisation settings, e.g. `quantization_config` of config.json; errors name the key."""

    def __init__(self, raw: dict[str, Any], location: str) -> None:
        self.raw = raw
        self.location = location

    def get(self, *keys: str) -> Any:
        """Return the value of the first of `keys` that is given: tools use different names for one setting."""
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), None)

    def table(self, key: str) -> QuantizationSettings:
        value = self.raw.get(key)
        if value is None:
            return QuantizationSettings({}, f"{self.location}.{key}")
        if not isinstance(value, dict):
            raise self.unsupported(key, value, "Repair the settings: it must be a JSON object.")
        return QuantizationSettings(value, f"{self.location}.{key}")

    def tables(self, key: str) -> list[QuantizationSettings]:
        """Return all tables in the table `key`."""
        outer = self.table(key)
        return [outer.table(name) for name in outer.raw]

    def integer(self, keys: Sequence[str], default: int | None = None) -> int:
        value = self.get(*keys)
        value = default if value is None else value
        if type(value) is not int:
            raise self.unsupported(keys[0], value, "Repair the settings: it must be an integer.")
        return value

    def one_of(self, keys: Sequence[str], default: Any, choices: Sequence[Any]) -> Any:
        value = self.get(*keys)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            names = ", ".join(str(choice).lower() for choice in choices)
            raise self.unsupported(keys[0], value, f"Supported: {names}. {USE_ANOTHER}")
        return value

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.get(*keys)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.unsupported(keys[0], value, "Repair the settings: it must be true or false.")
        return value

    def names(self, key: str) -> list[str]:
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.unsupported(key, value, "Repair the settings: it must be a list of names.")
        return value

    def group_size(self, keys: Sequence[str], default: int | None = None) -> int | None:
        """Return the number of inputs that share a scale, or None for all, which is written as -1."""
        value = self.integer(keys, default)
        if value != -1 and value < 1:
            raise self.unsupported(keys[0], value, "Repair the settings: a number of inputs, or -1 for all of them.")
        return None if value == -1 else value

    def refuse(self, key: str, neutral: Sequence[Any], fix: str = USE_ANOTHER) -> None:
        """Raise `StartupError` if `key` is given and not one of `neutral`."""
        value = self.raw.get(key)
        if value is not None and value not in neutral:
            raise self.unsupported(key, value, fix)

    def unsupported(self, key: str, value: Any, fix: str = USE_ANOTHER) -> StartupError:
        text = repr(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return StartupError(
            f"the checkpoint's quantisation has {self.location}.{key} = {text}, which is not supported.", fix
        )
