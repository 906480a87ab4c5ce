"""Typed access to one `config.json`; errors name the key.

A key that changes the forward pass and that a family does not read is refused, never ignored. Torch-free.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there, read_table
from oarlock.workers.layers.decoder_spec import DecoderSpec

# Keys of other architectures that change the forward pass, and the values that change nothing. Any other value is
# refused, unless the family's file reads the key.
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
    "is_causal": (None, True),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
    "swiglu_limit": (None,),
    "swiglu_limits": (None,),  # K-EXAONE 2.0, with the class of K-EXAONE
    "sliding_windows": (None,),
    "llama_4_scaling": (None,),  # factors of queries by their position, in models of DeepSeek V3's kind
}


# Sizes, lengths and token ids are sent as int32. Other numbers are used in float32, so products of a few of them, and
# of a number with a position, must stay finite. No known model comes near these limits.
MOST = 2**31 - 1
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e15
MOST_LAYERS = 10_000
MOST_LABELS = 64  # values that fit into a step, however small the model is

_HEAD = re.compile(r"For[A-Z]\w+$|LM\w*$|Model$")  # end of the name of a class, which many classes share
_SIMILAR = 0.7  # ratio of `difflib` between names that belong to one family


def unsupported(key: str, value: Any, fix: str) -> StartupError:
    return StartupError(f"config.json: {key} = {shown(value)} is not supported.", fix)


def wrong(key: str, what: str, value: Any) -> StartupError:
    return StartupError(f"config.json: {key} must be {what}, got {shown(value)}.", "Repair config.json.")


def others_like(name: Any, known: Iterable[str]) -> str:
    """Return the fix for an architecture that is not supported: the `known` ones with similar names, and the command
    that lists all."""
    listed = "`oarlock models --supported` lists all architectures."
    if not isinstance(name, str):
        return listed
    stems: dict[str, list[str]] = {}
    for one in known:
        stems.setdefault(_HEAD.sub("", one).lower(), []).append(one)
    near = difflib.get_close_matches(_HEAD.sub("", name).lower(), stems, cutoff=_SIMILAR)
    names = ", ".join(one for stem in near for one in stems[stem])
    return f"Supported, with a similar name: {names}. {listed}" if near else listed


def positive_number(key: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise wrong(key, "a positive number", value)
    if not LEAST_NUMBER <= value <= MOST_NUMBER:
        raise wrong(key, f"between {LEAST_NUMBER:g} and {MOST_NUMBER:g}", value)
    return float(value)


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a model directory. Raise `StartupError` if none can be read."""
    if not directory.is_dir():
        raise StartupError(f"model directory {directory} does not exist.", "Check the path, or download the model.")
    path = directory / "config.json"
    if not is_there(path):
        raise StartupError(f"{directory} has no config.json.", "Point to a model directory in the Hugging Face layout.")
    return read_table(path)


class Fields:
    """One `config.json`. It records the keys that were read; `refuse_the_rest` checks the others."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.raw = config
        self._read: set[str] = set()

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        value = self._get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise wrong(key, "a positive integer" if least == 1 else f"an integer of at least {least}", value)
        if value > most:
            raise wrong(key, f"at most {most}", value)
        return value

    def renamed(self, keys: Mapping[str, tuple[str, int]]) -> "Fields":
        """Return the config with the counts at `keys`, this config's key -> (usual key, default), at the usual keys.

        A config may have the usual keys as well, as in transformers; then both must agree.
        """
        usual = {}
        for key, (name, default) in keys.items():
            given = self.raw.get(name)
            usual[name] = self.count(key) if self._get(key) is not None else self.count(name, default)
            if given is not None and given != usual[name]:
                raise StartupError(f"config.json: {key} and {name} differ.", "Repair one of them.")
        return self.derived({**self.raw, **usual})

    def derived(self, config: dict[str, Any]) -> "Fields":
        """Return the fields of `config`, which was made of this one. A key that is read of either is read of both."""
        found = Fields(config)
        found._read = self._read
        return found

    def check_value(self, key: str, *values: Any) -> None:
        """Raise `StartupError` if `key` is given with a value that is not among `values`, which are served."""
        if self._get(key) not in (None, *values):
            served = f"Supported: {', '.join(map(shown, values))}."
            raise unsupported(key, self.raw[key], served if values else "This architecture is served only without it.")

    def layers(self) -> int:
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    def table(self, key: str) -> dict[str, Any]:
        """Return the settings given under `key`. Null means not given, for the table and for each setting."""
        value = self._get(key)
        if value is not None and not isinstance(value, dict):
            raise unsupported(key, value, "It must be a JSON object.")
        return {name: entry for name, entry in (value or {}).items() if entry is not None}

    def number(self, key: str, default: float) -> float:
        return positive_number(key, self._get(key), default)

    def number_or_none(self, key: str, default: float | None) -> float | None:
        """Return the number, or `default` if the key is absent; an explicit null means None."""
        self._read.add(key)
        value = self.raw.get(key, default)
        return None if value is None else positive_number(key, value, None)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise wrong(key, "true or false", value)
        return value

    def choice(self, key: str, default: str, choices: dict[str, str]) -> str:
        """Map the key's value by `choices`. Raise `StartupError` for a value that is not among them."""
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in choices:
            raise unsupported(key, value, f"Supported: {', '.join(choices)}.")
        return choices[value]

    def serve_only(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise `StartupError` for a key whose value is none of those that this family serves, null included."""
        for key, values in neutral.items():
            value = self._get(key)
            if value is not None and value not in values:
                raise unsupported(key, value, f"Supported: {', '.join(map(str, values))}.")

    def refuse_the_rest(self) -> None:
        """Raise `StartupError` for an unread key that changes the forward pass."""
        for key, neutral in _NEUTRAL.items():
            if key not in self._read and self.raw.get(key) not in neutral:
                raise unsupported(key, self.raw[key], "This architecture is served only without it.")

    def _get(self, key: str) -> Any:
        self._read.add(key)
        return self.raw.get(key)


Describe = Callable[[Fields], DecoderSpec]  # returns the decoder that the fields of a family describe
