"""Parts of a chat request: messages, content parts, tools and tool choices."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import FieldError, StrictModel

MAX_PARTS = 1024
MAX_CALLS = 128
MAX_SCHEMA_CHARACTERS = 256 * 1024


def content_form(value: Any) -> str | None:
    """The tag of the form that a message's content has."""
    return "form:plain" if isinstance(value, str) else "form:parts" if isinstance(value, list) else None


def _text_type(value: str) -> str:
    if value not in ("text", "refusal"):
        raise FieldError("messages", f"holds a content part of type '{value}': this server reads parts of type 'text'")
    return value


def _role(value: Any) -> Any:
    if value == "function":
        raise FieldError("messages", "holds the role 'function', which is obsolete: use the role 'tool'")
    return value


def plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value, if it can be written as JSON and is not too large. Raises `ValueError`."""
    try:
        size = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise ValueError("NaN and Infinity are not numbers in JSON") from None
    if size > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"it has {size} characters as JSON, at most {MAX_SCHEMA_CHARACTERS} are accepted")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(plain_json)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class TextPart(StrictModel):
    """The one kind of content part that a text model can read; a refusal is an assistant's own text."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_text_type)]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="after")
    def _has_its_member(self) -> TextPart:
        if self.type not in self.model_fields_set:
            raise FieldError("messages", f"holds a content part of type '{self.type}' without the key '{self.type}'")
        return self


Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    Discriminator(
        content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of text parts"
    ),
]


class CalledFunction(StrictModel):
    """What an earlier answer called, with the arguments as the text they came as."""

    name: ToolName
    arguments: str


class ToolCall(StrictModel):
    """One call in an assistant's message."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """One turn of a conversation."""

    role: Annotated[Literal["developer", "system", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None  # in OpenAI's own answers; they add no text

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("messages", f"holds tool_calls in a message of the role '{self.role}'")
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError("messages", "holds a message of the role 'tool' without tool_call_id")
        # Histories hold answers as other servers wrote them, with an empty list of calls, or with thoughts alone.
        is_answer = self.role == "assistant" and (self.tool_calls is not None or self.thoughts is not None)
        if self.content is None and self.refusal is None and not is_answer:
            raise FieldError("messages", "holds a message without content")
        return self

    @property
    def text(self) -> str:
        """The content, its parts joined; of a message without content, the refusal."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content)

    @property
    def thoughts(self) -> str | None:
        """The reasoning, under either of its names."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class FunctionDefinition(StrictModel):
    """What can be called."""

    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise FieldError("tools", f"holds '{self.name}', whose parameters do not describe an object")
        return self


class Tool(StrictModel):
    """One tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As published templates expect it."""
        described = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": self.type, "function": described}


class FunctionName(StrictModel):
    """A function by name."""

    name: str


class NamedChoice(StrictModel):
    """This tool must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_CALLS)]


class AllowedChoice(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_form(value: Any) -> str | None:
    """The tag of the form that a tool choice has."""
    if isinstance(value, str):
        return "form:word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"function": "form:named", "allowed_tools": "form:allowed"}.get(kind) if isinstance(kind, str) else None


ToolChoiceOption = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("form:word")]
    | Annotated[NamedChoice, Tag("form:named")]
    | Annotated[AllowedChoice, Tag("form:allowed")],
    Discriminator(
        choice_form,
        custom_error_type="choice_form",
        custom_error_message=(
            'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
            '{"type": "allowed_tools", …}'
        ),
    ),
]
