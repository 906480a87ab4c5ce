"""A checkpoint's end tokens and default sampling, from its `generation_config.json`.

`--generation-config` works as vLLM's: `auto` reads the model's file, a folder reads that folder's file instead, and
`vllm` leaves the sampling neutral. End tokens count in each case. Values have the ranges of requests.

`do_sample: false` means greedy decoding, as in transformers, whatever temperature the file names beside it. Without
`do_sample` the temperature is the file's, or 1, as OpenAI's API, vLLM and their users expect; transformers would decode
greedily. A temperature in the request wins over all of this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import is_there
from oarlock.engine.types import SamplingParams
from oarlock.server.endpoints.schema import SamplingFields
from oarlock.server.hub.model_path import read_json
from oarlock.server.strict_model import INT32_MAX, WHOLE, StrictModel

FILE = "generation_config.json"
AUTO, NEUTRAL = "auto", "vllm"
_SAMPLING = tuple(row.name for row in SamplingParams.table() if row.is_model_default)
_fields: dict[str, Any] = {name: (SamplingFields.model_fields[name].rebuild_annotation(), None) for name in _SAMPLING}
_fields["max_new_tokens"] = (Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None, None)
_fields["do_sample"] = (bool | None, None)
_Sampling = create_model("_Sampling", __base__=StrictModel, **_fields)
_EndTokens = TypeAdapter(list[Annotated[int, Field(ge=0, le=INT32_MAX)]], config=ConfigDict(strict=True))


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults for the fields that a request leaves out."""

    source: str = "neutral"  # the file, or "neutral"
    sampling: Mapping[str, float] = field(default_factory=dict)  # fields of a request, by name
    max_new_tokens: int | None = None  # the limit of every request
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def load(model: str | Path, choice: str = AUTO) -> "GenerationConfig":
        """Read the defaults of the model in this directory. Raises `StartupError`."""
        folder = Path(model) if choice in (AUTO, NEUTRAL) else Path(choice)
        file = folder / FILE
        if choice not in (AUTO, NEUTRAL) and not is_there(file):
            raise StartupError(
                f"--generation-config names {choice}, which is not a folder with a {FILE}.",
                f"Give the folder of such a file, or `{AUTO}` for the model's own, or `{NEUTRAL}` for none.",
            )
        values = read_json(file)
        ends = _end_tokens(file, values) or _end_tokens(Path(model) / "config.json")
        if choice == NEUTRAL:
            return GenerationConfig(eos_token_ids=ends)
        sampling = _sampling(file, values)
        limit = sampling.pop("max_new_tokens", None)
        if sampling.pop("do_sample", None) is False:
            sampling["temperature"] = 0.0
        return GenerationConfig(str(file) if sampling or limit else "neutral", sampling, limit, ends)


def _sampling(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The file's sampling fields. Raises `StartupError` for a value that no request may have."""
    try:
        checked = _Sampling.model_validate({name: values.get(name) for name in _fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise StartupError(
            f"'{first['loc'][0]}' in {file} is {str(first['input'])[:64]!r}: {reason}.",
            f"Correct that line, or start with --generation-config {NEUTRAL}, which leaves the file's sampling out.",
        ) from None
    return {name: value for name in _fields if (value := getattr(checked, name)) is not None}


def _end_tokens(file: Path, values: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    value = (read_json(file) if values is None else values).get("eos_token_id")
    if value is None:
        return ()
    try:
        return tuple(_EndTokens.validate_python(value if isinstance(value, list) else [value]))
    except ValidationError:
        raise StartupError(
            f"'eos_token_id' in {file} is {str(value)[:64]!r}, which is neither a token id nor a list of them.",
            "Correct that line.",
        ) from None
