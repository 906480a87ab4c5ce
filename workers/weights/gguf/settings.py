"""Typed access to the settings of a GGUF model; errors name the setting and the file. Torch-free."""

import struct
from array import array
from typing import overload

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.gguf.model import GGUFModel
from oarlock.workers.weights.gguf.names import ARCHITECTURES

_FIX = "Use a file that llama.cpp's converter wrote."


class Settings:
    """The settings of one model. Those of its architecture are named without the architecture, with a dot in front."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.architecture = self.text("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise StartupError(
                f"{model.path}: architecture {self.architecture[:80]!r} is not supported.",
                f"Supported in GGUF: {', '.join(ARCHITECTURES)}.",
            )

    def has(self, key: str) -> bool:
        return self._key(key) in self.model.settings

    @overload
    def count(self, key: str, default: None = None) -> int: ...
    @overload
    def count(self, key: str, default: int) -> int: ...
    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, or one for each layer if all are the same."""
        value = self._value(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or value < 0:
            raise self._wrong(key, "one whole number")
        return value

    @overload
    def number(self, key: str, default: None = None) -> float: ...
    @overload
    def number(self, key: str, default: float) -> float: ...
    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self._wrong(key, "a number")
        assert isinstance(value, int | float)
        return shortest(float(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str, length: int) -> array:
        """The list of `length` numbers at `key`. Raises `StartupError` for anything else."""
        value = self._value(key, None)
        if not isinstance(value, array) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers")
        return value

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _value(self, key: str, default: object) -> object:
        value = self.model.settings.get(self._key(key), default)
        if value is None:
            raise StartupError(f"{self.model.path} has no setting {self._key(key)!r}.", _FIX)
        return value

    def _wrong(self, key: str, what: str) -> StartupError:
        return StartupError(f"{self.model.path}: setting {self._key(key)!r} must be {what}.", _FIX)


def shortest(value: float) -> float:
    """The number with the fewest digits that is `value` in float32: what it was before it was stored so."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:  # it was stored as a double
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value
