"""The strict base class of all request schemas, their limits, and the value types that several schemas share.

Strict pydantic refuses NaN, numbers as text, `true` for a number, lone surrogates and deep nesting. Every limit is part
of the schema, so that it is in the OpenAPI document.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from oarlock.engine.types import MAX_PRIORITY, MIN_PRIORITY

MAX_PROMPTS = 1024
MAX_CHOICES = 128
MAX_SEQUENCES = 2048  # prompts x choices of one request
MAX_PROMPT_IDS = 1_048_576
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_ALLOWED_IDS = 262_144
MAX_TIMEOUT_S = 86_400
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def _whole_number(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


# JSON has one number type: 16.0 is the integer 16, in JSON schemas too. This is the last annotation of every integer
# field. Token ids in lists are strict, so that a million of them are read at full speed.
WHOLE = BeforeValidator(_whole_number)


def at_most(most: int) -> BeforeValidator:
    """Return a validator that refuses an object with too many members, by one error instead of one per member."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_many", "must have at most {most} items", {"most": f"{most:,}"})
        return value

    return BeforeValidator(check)


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
DecimalId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

# For a field's `json_schema_extra`: accepted so that clients need not change, without effect on the response's text.
ACCEPTED: JsonDict = {"x-effect": "none"}
# The same for a field that requests something this server does not do, if a response without it is still right. Such a
# field is reported as ignored, and refused with `--strict-parameters`.
IGNORED: JsonDict = {"x-effect": "ignored"}

# Fields of every request that waits for the engine, with their descriptions.
Timeout = Annotated[
    Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None,
    Field(
        description="time limit in seconds, after which the response is 408. The header X-Request-Timeout "
        "has the same effect; the shorter limit applies"
    ),
]
Priority = Annotated[
    Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY), WHOLE] | None,
    Field(description="lower runs earlier; waiting time also counts, so that no request starves"),
]
CacheSalt = Annotated[
    Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]*$")] | None,
    Field(description="prompt prefixes are shared in the KV cache only between equal salts; printable ASCII"),
]
User = Annotated[
    Annotated[str, Field(max_length=1024)] | None,
    Field(description="accepted; a hash of it in the request log", json_schema_extra=ACCEPTED),
]


class FieldError(ValueError):
    """Two fields that do not go together. `param` is the field to change, `code` the code of the error."""

    def __init__(self, param: str, problem: str, code: str | None = None) -> None:
        super().__init__(f"'{param}' {problem}.")
        self.param = param
        self.code = code


# Code of an error about a part of a message that is not text -> the parts in words, and their types in the APIs.
MEDIA = {
    "images_not_supported": ("images are", ("image", "image_url", "input_image", "image_file")),
    "audio_not_supported": ("audio is", ("audio", "audio_url", "input_audio")),
    "videos_not_supported": ("videos are", ("video", "video_url", "input_video")),
    "files_not_supported": ("files are", ("file", "file_url", "input_file", "document")),
}
MEDIA_CODES = {kind: code for code, (_, kinds) in MEDIA.items() for kind in kinds}


class StrictModel(BaseModel):
    """Base of the request schemas: strict, and `null` means the default in every field."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", protected_namespaces=())
    _ignored_names: ClassVar[tuple[str, ...]] = ()  # fields that are marked `IGNORED`
    _not_null: ClassVar[frozenset[str]] = frozenset()  # fields whose default is not null

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Record the fields that are marked `IGNORED`, and the fields whose default is not null."""
        super().__pydantic_init_subclass__(**kwargs)
        fields = cls.model_fields.items()
        cls._ignored_names = tuple(name for name, field in fields if field.json_schema_extra == IGNORED)
        cls._not_null = frozenset(name for name, field in fields if field.default is not None)

    def model_post_init(self, context: Any, /) -> None:
        """Treat a field that is null as not given: remove it from `model_fields_set`."""
        given = self.model_fields_set & self._not_null
        if None not in map(self.__dict__.get, given):  # the usual case; a conversation has thousands of these objects
            return
        for name in given:
            if getattr(self, name) is None:
                setattr(self, name, type(self).model_fields[name].get_default(call_default_factory=True))
                self.model_fields_set.discard(name)

    def ignored_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the fields that no schema declares or that have no effect; nested fields as `outer.inner`.

        If a field is ignored as a whole, only the field itself is yielded.
        """
        if self.model_extra:
            yield from (prefix + name for name, value in self.model_extra.items() if value is not None)
        yield from (prefix + name for name in self.without_effect())
        for name in self.model_fields_set - set(self._ignored_names):
            value = self.__dict__.get(name)  # None for a field that no schema declares
            items = value if isinstance(value, list) and value and isinstance(value[0], StrictModel) else (value,)
            for item in items:
                if isinstance(item, StrictModel):
                    yield from item.ignored_fields(f"{prefix}{name}.")

    def without_effect(self) -> Iterator[str]:
        """Yield the declared fields of this object that have no effect and are not at their default."""
        if ignored := type(self)._ignored_names:
            values = ((name, getattr(self, name)) for name in ignored)
            yield from (name for name, value in values if value and value != type(self).model_fields[name].default)


def prompt_form(value: Any) -> str | None:
    """Return the tag of a prompt's form. The first element decides; the others are checked against it afterwards."""
    if isinstance(value, str):
        return "form:text"
    if not isinstance(value, list):
        return None
    if not value or isinstance(value[0], str):
        return "form:texts"
    if isinstance(value[0], list):
        return "form:id_lists"
    return "form:ids" if isinstance(value[0], int) and not isinstance(value[0], bool) else None


def _stop_form(value: Any) -> str | None:
    return "form:one" if isinstance(value, str) else "form:many" if isinstance(value, list) else None


Prompt = Annotated[
    Annotated[str, Tag("form:text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("form:texts")]
    | Annotated[TokenIds, Tag("form:ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("form:id_lists")],
    Discriminator(
        prompt_form,
        custom_error_type="prompt_form",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("form:one")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("form:many")],
    Discriminator(
        _stop_form, custom_error_type="stop_form", custom_error_message="must be a string or a list of strings"
    ),
]
