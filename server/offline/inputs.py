"""Inputs of the Python interface: sampling parameters, adapters, and prompts in every format that vLLM's interface
accepts."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request.

    A field that is None has the server's default, which for sampling may be the model's own. Ranges and errors are the
    server's.

    `docs/api.md` describes each field.
    """

    max_tokens: int | None = None  # None: 16 for `generate`, the rest of the context for `chat`
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    n: int | None = None  # choices of each prompt
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None  # number of alternatives with each token
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # end that is cut: left (the default) or right
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    timeout: float | None = None  # seconds
    priority: int | None = None
    cache_salt: str | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return the given fields, as in the body of a completion request."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def as_chat_fields(self) -> dict[str, Any]:
        """Return the given fields, as in the body of a chat completion request."""
        found = self.as_fields()
        if self.logprobs is not None:
            found |= {"logprobs": True, "top_logprobs": self.logprobs}
        return found


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter of a request, with the fields of vLLM's class in its order.

    The adapter is loaded when its name is first used. A name keeps its adapter until the `LLM` closes, unless
    `load_inplace` asks for the files as they are now.
    """

    lora_name: str
    lora_int_id: int  # at least 1; a number belongs to one name
    lora_path: str  # a directory with the files of PEFT, a GGUF file, or an id on the hub
    _: KW_ONLY
    load_inplace: bool = False  # read the files at every call; requests in progress with other content fail

    def __post_init__(self) -> None:
        """Raise `ValueError` for a field that is empty or too small."""
        if not self.lora_name or not self.lora_path:
            raise ValueError("a LoRARequest needs a name and a path: LoRARequest('sql', 1, '/path/to/adapter')")
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id of {self.lora_name!r} is {self.lora_int_id}, but it must be at least 1")


Prompt = str | list[int]
# A text, token ids, or a dictionary with `prompt` or `prompt_token_ids`.
GivenPrompt = str | Sequence[int] | Mapping[str, Any]
Prompts = GivenPrompt | Sequence[GivenPrompt]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
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
        raise TypeError(f"a prompt that is a dictionary {what}: give one of {', '.join(_KEYS)}")
    return _read(found[-1])  # vLLM's own programs send the text along with its ids


def params_for_each(params: Params, count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raises `ValueError`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    return _one_each(params, count, "SamplingParams")


def adapters_for_each(adapters: Adapters, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts; None: the model without an adapter. Raises `ValueError`."""
    if adapters is None or isinstance(adapters, LoRARequest):
        return [adapters] * count
    return _one_each(adapters, count, "entries of lora_request")


def _one_each(given: Sequence[_T], count: int, name: str) -> list[_T]:
    if len(given) != count:
        raise ValueError(f"there are {count} prompts and {len(given)} {name}: give one for all, or one each")
    return list(given)


def check_names(method: str, fields: Mapping[str, Any], known: type, of_sampling: str | None = None) -> None:
    """Raise `TypeError` for a name that `known`, a `TypedDict`, lacks. `of_sampling`: the fix if `SamplingParams` has
    the name."""
    names = known.__annotations__
    for name in fields:
        if name not in names:
            fix = (
                of_sampling
                if of_sampling and name in SamplingParams.__slots__
                else f"its arguments are {', '.join(names)}"
            )
            raise TypeError(f"{method}() has no argument '{name}': {fix}")
