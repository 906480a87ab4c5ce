"""Typed access to a checkpoint's quantisation settings; errors name the key, and say what to do. Torch-free."""

from collections.abc import Sequence
from typing import Any

from oarlock.workers.errors import StartupError

USE_ANOTHER = "Use another quantisation of the model, or its bfloat16, float16 or float32 checkpoint."
_LONGEST = 80  # characters of a value in an error


class Settings:
    """One table, e.g. `quantization_config` of config.json."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def get(self, *keys: str) -> Any:
        """The value of the first of `keys` that is given: tools use different names for one setting."""
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), None)

    def table(self, key: str) -> "Settings":
        value = self.raw.get(key)
        if value is None:
            return Settings({}, f"{self.where}.{key}")
        if not isinstance(value, dict):
            raise self.unsupported(key, value, "Repair the settings: it must be a table.")
        return Settings(value, f"{self.where}.{key}")

    def tables(self, key: str) -> list["Settings"]:
        """All tables in the table `key`."""
        outer = self.table(key)
        return [outer.table(name) for name in outer.raw]

    def whole(self, keys: Sequence[str], default: int | None = None) -> int:
        value = self.get(*keys)
        value = default if value is None else value
        if type(value) is not int:
            raise self.unsupported(keys[0], value, "Repair the settings: it must be a whole number.")
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

    def words(self, key: str) -> list[str]:
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.unsupported(key, value, "Repair the settings: it must be a list of names.")
        return value

    def group_size(self, keys: Sequence[str], default: int | None = None) -> int | None:
        """Inputs that share a scale; None: all of them, written -1."""
        value = self.whole(keys, default)
        if value != -1 and value < 1:
            raise self.unsupported(keys[0], value, "Repair the settings: a number of inputs, or -1 for all of them.")
        return None if value == -1 else value

    def refuse(self, key: str, neutral: Sequence[Any], fix: str = USE_ANOTHER) -> None:
        """Raise `StartupError` where `key` is given and is none of `neutral`."""
        value = self.raw.get(key)
        if value is not None and value not in neutral:
            raise self.unsupported(key, value, fix)

    def unsupported(self, key: str, value: Any, fix: str = USE_ANOTHER) -> StartupError:
        text = repr(value)
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return StartupError(f"the checkpoint's quantisation has {self.where}.{key} = {text}, which is not served.", fix)
