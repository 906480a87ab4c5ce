"""The content blocks of `/v1/messages`: text, thoughts, calls of tools, and their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import ACCEPTED, FieldError, StrictModel
from oarlock.server.protocol.chat_messages import MAX_PARTS, JsonObject, ToolName, content_form

BlockId = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(StrictModel):
    """Where a client wants a beginning cached. All beginnings are found here without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheControlField = Annotated[
    CacheControl | None,
    Field(description="accepted; equal beginnings of prompts are found without it", json_schema_extra=ACCEPTED),
]


class TextBlock(StrictModel):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControlField = None
    citations: None = None  # of documents, which are refused


class ThinkingBlock(StrictModel):
    """What an earlier answer thought. Any signature is taken: thoughts are the client's own words here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    """Thoughts that another server encrypted: no text for this model."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: BlockId
    name: ToolName
    input: JsonObject
    cache_control: CacheControlField = None
    caller: dict[str, Any] | None = Field(None, json_schema_extra=ACCEPTED)
    toolset_name: None = None


def _unread(kind: str) -> str:
    problem = f"holds a block of type '{kind}'; this server reads text, thinking, tool_use and tool_result"
    raise FieldError("messages", problem)


class UnreadBlock(StrictModel):
    """Any other block: media, documents, tools that a server runs. Refused by its name."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_unread)]


def _block_form(*known: str) -> Any:
    def form(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if not isinstance(kind, str):
            return None
        return f"form:{kind}" if kind in known else "form:unread"

    return Discriminator(
        form, custom_error_type="block_form", custom_error_message="must be an object with a string 'type'"
    )


TextOnly = Annotated[
    Annotated[TextBlock, Tag("form:text")] | Annotated[UnreadBlock, Tag("form:unread")], _block_form("text")
]
_CONTENT = Discriminator(
    content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of blocks"
)
Text = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[TextOnly], Field(max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    _CONTENT,
]


class ToolResultBlock(StrictModel):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: Text | None = None
    is_error: bool | None = None
    cache_control: CacheControlField = None
    toolset_name: None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
Block = Annotated[
    Annotated[TextBlock, Tag("form:text")]
    | Annotated[ThinkingBlock, Tag("form:thinking")]
    | Annotated[RedactedThinkingBlock, Tag("form:redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("form:tool_use")]
    | Annotated[ToolResultBlock, Tag("form:tool_result")]
    | Annotated[UnreadBlock, Tag("form:unread")],
    _block_form(*_BLOCKS),
]
Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    _CONTENT,
]


class InputMessage(StrictModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _says_something(self) -> InputMessage:
        if self.role != "assistant" and not self.content and isinstance(self.content, list):
            raise FieldError("messages", f"holds a message of the role '{self.role}' without content")
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)] if self.content else []
        return self.content


def text_of(content: str | list[Any] | None) -> str:
    """Blocks of text joined."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)
