"""Typed access to one `config.json`, and refusals that name its key.

A value that would change the mathematics and that nobody has read is refused, never skipped. Knows keys that several
architectures share, no family and no meaning. Torch-free.
"""

import math
from typing import Any

from workers.errors import StartupError

# Keys of neighbouring architectures that alter the forward pass: with another value than these they are refused,
# unless the family's page has read them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "kv_lora_rank": (None,),
    "clip_qkv": (None,),
    "alibi": (None, False),
    "use_parallel_residual": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_bidirectional_attention": (None, False),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
}


def unsupported(key: str, value: Any, fix: str) -> StartupError:
    return StartupError(f"config.json: {key} = {value!r} is not supported.", fix)


def positive_number(key: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise StartupError(f"config.json: {key} must be a positive number, got {value!r}.", "Repair config.json.")
    return float(value)


class Fields:
    """One `config.json`. What is read through it is understood; `refuse_the_rest` looks at what was not."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.raw = config
        self._read: set[str] = set()

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise StartupError(f"config.json: {key} must be a positive integer, got {value!r}.", "Repair config.json.")
        return value

    def number(self, key: str, default: float) -> float:
        return positive_number(key, self._get(key), default)

    def number_or_none(self, key: str, default: float | None) -> float | None:
        """`default` where the key is absent; an explicit null means none."""
        self._read.add(key)
        value = self.raw.get(key, default)
        return None if value is None else positive_number(key, value, None)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise StartupError(f"config.json: {key} must be true or false, got {value!r}.", "Repair config.json.")
        return value

    def choice(self, key: str, default: str, choices: dict[str, str]) -> str:
        """The meaning of one of `choices`."""
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise unsupported(key, value, f"Supported: {', '.join(choices)}.")
        return choices[value]

    def refuse_the_rest(self) -> None:
        """Raise `StartupError` for a key that alters the forward pass and that nobody has read."""
        for key, neutral in _NEUTRAL.items():
            if key not in self._read and self.raw.get(key) not in neutral:
                raise unsupported(key, self.raw[key], "This architecture is served only without it.")

    def _get(self, key: str) -> Any:
        self._read.add(key)
        return self.raw.get(key)
