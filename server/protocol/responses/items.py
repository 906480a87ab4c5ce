"""The input items of `/v1/responses`: messages, calls of functions and their results, thoughts, references."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import FieldError, StrictModel
from oarlock.server.protocol.chat_messages import MAX_PARTS, ToolName, content_form
from oarlock.server.protocol.responses.unsupported import AsyncCall, CacheBreakpoint, Caller, Namespace

ItemId = Annotated[str, Field(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_TEXT_PARTS = ("input_text", "output_text", "text")


def _part_type(value: str) -> str:
    if value not in (*_TEXT_PARTS, "refusal"):
        raise FieldError("input", f"holds a part of type '{value}': this server reads text only, type 'input_text'")
    return value


class ContentPart(StrictModel):
    """A part of a message or of a call's result; a refusal is an assistant's own text."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_part_type)]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None  # of answers; they add no text
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint = None

    @model_validator(mode="after")
    def _has_its_member(self) -> ContentPart:
        member = "refusal" if self.type == "refusal" else "text"
        if member not in self.model_fields_set:
            raise FieldError("input", f"holds a part of type '{self.type}' without the key '{member}'")
        return self


Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    Discriminator(
        content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of text parts"
    ),
]


def text_of(content: str | list[ContentPart]) -> str:
    """The parts joined."""
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


class MessageItem(StrictModel):
    """A turn of the conversation; an assistant's as it was answered, or written by the caller."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: Caller = None
    namespace: Namespace = None
    async_: AsyncCall = Field(None, alias="async")


class FunctionCallOutputItem(StrictModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None  # of the function; the call says it, too
    caller: Caller = None
    namespace: Namespace = None


class ThoughtPart(StrictModel):
    """A piece of the thoughts, or of their summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """What an earlier answer thought. `encrypted_content`, if there is no other, as this server writes it."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        """The thoughts. Raises `FieldError` for content that another server encrypted."""
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content is not None:
            return unsealed(self.encrypted_content)
        return "".join(part.text for part in self.summary or ())


class ItemReference(StrictModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _unread(kind: str) -> str:
    if kind in ("custom_tool_call", "custom_tool_call_output"):
        raise FieldError(
            "input", f"holds an item of type '{kind}'; tools are functions here: send 'function_call' items"
        )
    raise FieldError("input", f"holds an item of type '{kind}'; read here: {', '.join(_TYPES)}")


class UnreadItem(StrictModel):
    """Any other item: of tools that a server runs, or of media. Refused by its name."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_unread)]


def _item_form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "form:message" if "role" in value or "content" in value else "form:item_reference"
    return f"form:{kind}" if kind in _TYPES else "form:unread"


InputItem = Annotated[
    Annotated[MessageItem, Tag("form:message")]
    | Annotated[FunctionCallItem, Tag("form:function_call")]
    | Annotated[FunctionCallOutputItem, Tag("form:function_call_output")]
    | Annotated[ReasoningItem, Tag("form:reasoning")]
    | Annotated[ItemReference, Tag("form:item_reference")]
    | Annotated[UnreadItem, Tag("form:unread")],
    Discriminator(_item_form, custom_error_type="item_form", custom_error_message="must be an object"),
]

_SEAL = "oarlock-text:"


def sealed(thoughts: str) -> str:
    """Thoughts as a client that stores nothing sends them back: base64, not encrypted, since they are its own."""
    return _SEAL + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """What `sealed` was given. Raises `FieldError`."""
    try:
        if not text.startswith(_SEAL):
            raise ValueError
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except ValueError:
        problem = "holds encrypted_content that this server did not write; send the item's content, or leave it out"
        raise FieldError("input", problem) from None
