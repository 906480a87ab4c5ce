"""The value of `--speculative-config`: vLLM's JSON object with the keys that look up drafts, strictly checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oarlock.engine.config import SpeculativeConfig
from oarlock.server.config.option_checks import json_object
from oarlock.server.config.options import OptionError, nearest

EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'
_FLAG = "--speculative-config"
_LIMITS = {"num_speculative_tokens": 16, "prompt_lookup_max": 16, "prompt_lookup_min": 16}  # the largest values
_NUM_SPECULATIVE_TOKENS, _LOOKUP_MAX, _LOOKUP_MIN = 5, 4, 2  # where not given; with another maximum, at most that
# Other keys of vLLM, and what Oarlock does instead.
_NOT_HERE = {
    **dict.fromkeys(
        (
            "model",
            "draft_tensor_parallel_size",
            "quantization",
            "revision",
            "code_revision",
            "tokenizer",
            "max_model_len",
            "enforce_eager",
            "draft_load_config",
            "draft_sample_method",
        ),
        "no second model is loaded to draft.",
    ),
    "disable_by_batch_size": "drafts are made only while they are worth their rows, as the costs of steps tell.",
    "speculative_token_tree": "the drafts of a sequence follow each other.",
    "rejection_sample_method": "a draft is kept exactly if the model samples the same token.",
}


def parse_speculative_config(value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Parse and check the object. Raises `OptionError`."""
    keys = json_object(_FLAG, value, _usage())
    for name in keys:
        if name == "method" or name in _LIMITS:
            continue
        holds = _NOT_HERE.get(name)
        near = nearest(name, ("method", *_LIMITS))
        fix = f"Leave it out: {holds}" if holds else f"Did you mean {near}?" if near else f"For example: {_usage()}"
        raise OptionError(f"{_FLAG} has the key {name!r:.80}, which is not {'supported' if holds else 'known'}.", fix)
    if keys.get("method", "ngram") != "ngram":
        raise OptionError(
            f"{_FLAG} asks for the method {keys['method']!r:.80}, but the only one is 'ngram': drafts are looked up in "
            "the request's own prompt and answer.",
            f"For example: {_usage()}",
        )
    num_tokens = _number(keys, "num_speculative_tokens", _NUM_SPECULATIVE_TOKENS)
    longest = _number(keys, "prompt_lookup_max", max(_LOOKUP_MAX, _number(keys, "prompt_lookup_min", 1)))
    shortest = _number(keys, "prompt_lookup_min", min(_LOOKUP_MIN, longest))
    if shortest > longest:
        raise OptionError(
            f"{_FLAG} has a prompt_lookup_min ({shortest}) above prompt_lookup_max ({longest}).",
            f"Raise prompt_lookup_max to at least {shortest}, or lower prompt_lookup_min.",
        )
    return SpeculativeConfig(num_tokens, longest, shortest)


def _number(keys: Mapping[str, Any], name: str, default: int) -> int:
    value = keys.get(name, default)
    if type(value) is not int or not 1 <= value <= _LIMITS[name]:
        raise OptionError(
            f"{_FLAG} has {name} {value!r:.80}, but it must be an integer from 1 to {_LIMITS[name]}.",
            f"For example: {_usage()}",
        )
    return value


def _usage() -> str:
    return f"{_FLAG} '{EXAMPLE}'"
