"""End tokens and default sampling parameters of a checkpoint, from its `generation_config.json`.

`--generation-config` works as in vLLM: `auto` reads the model's file, a folder reads that folder's file instead, and
`vllm` leaves the sampling neutral. End tokens are used in each case. Values have the same ranges as in requests.

`do_sample: false` means greedy decoding, as in transformers, even if the file also sets a temperature. Without
`do_sample` the temperature is the file's, or 1, as OpenAI's API, vLLM and their users expect; transformers would decode
greedily. A temperature in the request takes precedence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there
from oarlock.engine.types import SamplingParams
from oarlock.server.hub.model_path import read_json
from oarlock.server.schemas.generation import SamplingFields
from oarlock.server.schemas.strict_model import INT32_MAX, WHOLE, StrictModel

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
_SAMPLING = tuple(row.name for row in SamplingParams.table() if row.is_model_default)
_fields: dict[str, Any] = {name: (SamplingFields.model_fields[name].rebuild_annotation(), None) for name in _SAMPLING}
_fields["max_new_tokens"] = (Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None, None)
_fields["do_sample"] = (bool | None, None)
_Sampling = create_model("_Sampling", __base__=StrictModel, **_fields)
_MAX_END_TOKENS = 64  # they are compared with each token; known models have at most eight
_EndTokens = TypeAdapter(
    Annotated[list[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=_MAX_END_TOKENS)],
    config=ConfigDict(strict=True),
)
# Other ids in the files, which are only checked. Some checkpoints write -1 for none.
_OTHER_IDS = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "unk_token_id")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults for the fields that a request omits."""

    source: str = "neutral"  # the file, or "neutral"
    sampling: Mapping[str, float] = field(default_factory=dict)  # request field -> value
    max_new_tokens: int | None = None  # token limit of every request
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def load(model: str | Path, choice: str = AUTO) -> "GenerationConfig":
        """Return the defaults of the model in this directory. Raises `StartupError` if a file is invalid."""
        folder = Path(model) if choice in (AUTO, NEUTRAL) else Path(choice)
        file = folder / FILE
        if choice not in (AUTO, NEUTRAL) and not is_there(file):
            raise StartupError(
                f"--generation-config is {choice}, which is not a folder with a {FILE}.",
                f"Give a folder with such a file, `{AUTO}` for the model's own file, or `{NEUTRAL}` for "
                "neutral values.",
            )
        values, config_file = read_json(file), Path(model) / "config.json"
        config = with_text_config(read_json(config_file))
        ends, others = _end_tokens(file, values), _end_tokens(config_file, config)
        for path, described in ((file, values), (config_file, config)):
            _check_other_ids(path, described)
        for path, ids in ((file, ends), (config_file, others)):
            _check_end_tokens(path, ids, config)
        ends = ends or others
        if choice == NEUTRAL:
            return GenerationConfig(eos_token_ids=ends)
        sampling = _sampling(file, values)
        limit = sampling.pop("max_new_tokens", None)
        if sampling.pop("do_sample", None) is False:
            sampling["temperature"] = 0.0
        return GenerationConfig(str(file) if sampling or limit else "neutral", sampling, limit, ends)


def _sampling(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's sampling fields. Raises `StartupError` for a value that no request may have."""
    try:
        checked = _Sampling.model_validate({name: values.get(name) for name in _fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise StartupError(
            f"'{first['loc'][0]}' in {file} is {str(first['input'])[:64]!r}: {reason}.",
            f"Correct that line, or start with --generation-config {NEUTRAL}, which ignores the file's "
            "sampling parameters.",
        ) from None
    return {name: value for name in _fields if (value := getattr(checked, name)) is not None}


def _end_tokens(file: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    value = values.get("eos_token_id")
    if value is None:
        return ()
    try:
        return tuple(_EndTokens.validate_python(value if isinstance(value, list) else [value]))
    except ValidationError:
        raise StartupError(
            f"'eos_token_id' in {file} is {shown(value)}, which is neither a token id nor a list of at most "
            f"{_MAX_END_TOKENS} of them.",
            "Correct that line.",
        ) from None


def _check_end_tokens(file: Path, ids: Sequence[int], config: Mapping[str, Any]) -> None:
    """Raise `StartupError` for an end token outside the model's vocabulary."""
    size = vocab_size_of(config)
    if size is not None and ids and max(ids) >= size:
        raise StartupError(
            f"'eos_token_id' in {file} is {max(ids)}, but the model's vocab_size is {size}: no completion would end.",
            "Correct that line.",
        )


def with_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the special tokens of its `text_config`, if it does not give them itself."""
    inner = config.get("text_config")
    ids = {} if not isinstance(inner, dict) else {name: inner[name] for name in inner if name.endswith("_token_id")}
    return ids | {name: value for name, value in config.items() if value is not None or name not in ids}


def vocab_size_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of the embedding that a `config.json` gives, or None if it gives none."""
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) and "vocab_size" in inner else config).get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _check_other_ids(file: Path, values: Mapping[str, Any]) -> None:
    """Raise `StartupError` if the file gives a special token as anything but an id or a short list of ids."""
    for name in _OTHER_IDS:
        value = values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if len(ids) > _MAX_END_TOKENS or not all(type(one) is int and -1 <= one <= INT32_MAX for one in ids):
            raise StartupError(f"'{name}' in {file} is {shown(value)}, which is not a token id.", "Correct that line.")
