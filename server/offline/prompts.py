"""Reads prompts of the Python interface in every form that vLLM's takes, and finds the parameters of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.server.offline.sampling_params import SamplingParams

Prompt = str | list[int]
# A text, token ids, or a dictionary with `prompt` or `prompt_token_ids`.
GivenPrompt = str | Sequence[int] | Mapping[str, Any]
Prompts = GivenPrompt | Sequence[GivenPrompt]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
_KEYS = ("prompt", "prompt_token_ids")


def read_prompts(given: Prompts) -> list[Prompt]:
    """Read one prompt or several as texts and lists of token ids. Raises `TypeError`."""
    is_one = isinstance(given, str | Mapping) or (len(given) > 0 and isinstance(given[0], int))
    return [_read(prompt) for prompt in ([given] if is_one else given)]


def _read(given: Any) -> Prompt:
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        return list(given)
    unknown = [name for name in given if name not in _KEYS]
    found = [given[name] for name in _KEYS if given.get(name) is not None]
    if unknown or not found:
        what = f"has no key '{unknown[0]}'" if unknown else "is empty"
        raise TypeError(f"a prompt that is a dictionary {what}: write one of {', '.join(_KEYS)}")
    return _read(found[-1])  # vLLM's own programs send the text along with its ids


def params_for_each(params: Params, count: int) -> list[SamplingParams]:
    """Find the parameters of each of `count` prompts. Raises `ValueError`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} SamplingParams: give one for all, or one each")
    return list(params)


def check_names(method: str, fields: Mapping[str, Any], known: type, of_sampling: str | None = None) -> None:
    """Raise `TypeError` for a name that `known`, a `TypedDict`, lacks. `of_sampling`: the fix for one that
    `SamplingParams` has."""
    names = known.__annotations__
    for name in fields:
        if name not in names:
            fix = of_sampling if of_sampling and name in SamplingParams.__slots__ else f"there are {', '.join(names)}"
            raise TypeError(f"{method}() has no argument '{name}': {fix}")
