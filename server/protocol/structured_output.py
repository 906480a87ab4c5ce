"""The fields of structured output: `response_format`, `structured_outputs`, and the types of the `guided_*` fields.

Unknown keys are refused here: each could be a constraint that the answer would not keep.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from oarlock.server.protocol.base import FieldError, StrictModel

MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_PATTERN_CHARACTERS = 16 * 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
MAX_ALTERNATIVES = 1024
MAX_ALTERNATIVE_CHARACTERS = 4096


def _wrong(problem: str) -> PydanticCustomError:
    """An error whose message is this sentence alone, without pydantic's words around it."""
    return PydanticCustomError("structured_form", "{problem}", {"problem": problem})


def _schema(value: Any) -> Any:
    """A JSON schema, given as it is or as text, within the limits."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_CHARACTERS:
            raise _wrong(_too_long(len(value)))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _wrong("it is text that is not JSON; give the schema itself") from None
    if not isinstance(value, dict | bool):
        raise _wrong("a JSON schema is an object, or true for any value")
    return value


def _within_limits(value: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if value is False:
        raise _wrong("no value matches the schema `false`")
    if _depth_reaches(value, MAX_SCHEMA_DEPTH + 1):
        raise _wrong(f"it is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        length = len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    except ValueError:
        raise _wrong("NaN and Infinity are not numbers in JSON") from None
    if length > MAX_SCHEMA_CHARACTERS:
        raise _wrong(_too_long(length))
    return value


def _too_long(length: int) -> str:
    return f"it has {length} characters as JSON, at most {MAX_SCHEMA_CHARACTERS} are accepted"


def _depth_reaches(value: Any, limit: int) -> bool:
    """Whether containers lie `limit` deep inside each other."""
    level = [value]
    for _ in range(limit):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [item for holder in level for item in (holder.values() if isinstance(holder, dict) else holder)]
    return True


JsonSchema = Annotated[
    dict[str, Any] | bool,
    BeforeValidator(_schema),
    AfterValidator(_within_limits),
    WithJsonSchema(
        {
            "anyOf": [{"type": "object", "additionalProperties": True}, {"type": "boolean"}, {"type": "string"}],
            "description": f"a JSON schema, or its text; {MAX_SCHEMA_CHARACTERS} characters and {MAX_SCHEMA_DEPTH} "
            "levels at most",
        }
    ),
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_ALTERNATIVE_CHARACTERS)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True),
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class _Closed(StrictModel):
    """No other keys than those declared."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", protected_namespaces=())


class JsonSchemaFormat(_Closed):
    """A named schema, as the official clients send it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(description="what the form is called")
    description: Annotated[str, Field(max_length=16 * 1024)] | None = Field(
        None, description="for people; the model is not told", json_schema_extra={"x-effect": "none"}
    )
    schema_: JsonSchema | None = Field(None, alias="schema", description="the answer matches it; without one, any JSON")
    strict: bool | None = Field(
        None, description="always so here: the answer never leaves the schema", json_schema_extra={"x-effect": "none"}
    )


class ResponseFormat(_Closed):
    """`response_format`: plain text, a JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="the form of the answer")
    json_schema: JsonSchemaFormat | None = Field(None, description="with `type: json_schema` only")

    @model_validator(mode="after")
    def _schema_fits_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise FieldError("response_format", "needs a json_schema with this type: {name, schema}")
        if self.type != "json_schema" and self.json_schema is not None:
            raise FieldError("response_format", "has a json_schema, which only goes with type json_schema")
        return self


class StructuredOutputs(_Closed):
    """`structured_outputs`: one constraint that the whole answer matches."""

    json_: JsonSchema | None = Field(None, alias="json", description="JSON that matches this schema")
    regex: Pattern | None = Field(None, description="a regular expression without look-around and back-references")
    choice: Alternatives | None = Field(None, description="one of these texts")
    grammar: GrammarText | None = Field(None, description="a context-free grammar, in Lark's or in GBNF notation")
    json_object: bool | None = Field(None, description="any JSON object")
