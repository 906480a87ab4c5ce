"""The requests of `/v1/messages` and `/v1/messages/count_tokens`, field for field, and their content blocks.

The sampling fields are the same as in the other endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.schemas.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    HostedTool,
    JsonObject,
    ReasoningEffort,
    ToolName,
    content_form,
)
from oarlock.server.schemas.generation import JsonSchema, ResponseFormat, SamplingFields
from oarlock.server.schemas.strict_model import (
    ACCEPTED,
    IGNORED,
    INT32_MAX,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MEDIA_CODES,
    WHOLE,
    FieldError,
    StrictModel,
)

BlockId = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(StrictModel):
    """The end of a prefix that a client wants cached. This server finds all shared prefixes without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


CacheControlField = Annotated[
    CacheControl | None,
    Field(description="accepted; equal prompt prefixes are found without it", json_schema_extra=ACCEPTED),
]


class TextBlock(StrictModel):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControlField = None
    citations: None = None  # citations of documents, which are refused


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier response. Any signature is accepted, because reasoning is the client's own text here."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    """Reasoning that another server encrypted. It has no text for this model."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A call in an earlier response."""

    type: Literal["tool_use"]
    id: BlockId
    name: ToolName
    input: JsonObject
    cache_control: CacheControlField = None
    caller: dict[str, Any] | None = Field(None, json_schema_extra=ACCEPTED)
    toolset_name: None = None


def _unread(kind: str) -> str:
    problem = f"contains a block of type '{kind}'; supported are text, thinking, tool_use and tool_result"
    raise FieldError("messages", problem, MEDIA_CODES.get(kind))


class UnreadBlock(StrictModel):
    """Any other block: media, documents, tools that a server runs. It is refused by its type."""

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
    """Result of a tool that was called."""

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
    def _has_content(self) -> InputMessage:
        if self.role != "assistant" and not self.content and isinstance(self.content, list):
            raise FieldError("messages", f"contains a message of the role '{self.role}' without content")
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)] if self.content else []
        return self.content


def text_of(content: str | list[Any] | None) -> str:
    """Return the joined text of the blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


# Fields of the other endpoints, each with the value that has no effect and the field or route to use instead. A
# response that ignored them would be wrong, or lack a requested part.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "n": (1, "there is one completion; send several requests"),
    "stop": ([], "use 'stop_sequences'"),
    "response_format": (None, "use 'output_config.format'"),
    "prompt_logprobs": (None, "use /v1/completions"),
    "return_token_ids": (False, "use /v1/completions"),
    "return_tokens_as_token_ids": (False, "use /v1/completions"),
}


class MessagesTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: JsonObject
    strict: bool | None = Field(None, description="calls that the model makes by itself also match the schema")
    cache_control: CacheControlField = None
    eager_input_streaming: bool | None = Field(None, json_schema_extra=ACCEPTED)
    defer_loading: bool | None = Field(None, json_schema_extra=IGNORED)  # the model sees the tool at once
    allowed_callers: Annotated[list[str], Field(max_length=16)] | None = None
    input_examples: Annotated[list[Any], Field(max_length=MAX_PARTS)] | None = Field(None, json_schema_extra=IGNORED)

    @model_validator(mode="after")
    def _model_may_call(self) -> MessagesTool:
        if self.allowed_callers and "direct" not in self.allowed_callers:
            raise FieldError(
                "tools", f"contains '{self.name}', whose allowed_callers leave out 'direct': no code is run here"
            )
        return self


def _tool_form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "form:custom"
    return "form:custom" if value.get("type") in (None, "custom") else "form:hosted"


Tool = Annotated[
    Annotated[MessagesTool, Tag("form:custom")] | Annotated[HostedTool, Tag("form:hosted")], Discriminator(_tool_form)
]


class ToolChoice(StrictModel):
    """A choice whether tools may or must be called."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(StrictModel):
    """A choice of one tool that must be called."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


def _choice_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind == "tool":
        return "form:tool"
    return "form:mode" if kind in ("auto", "any", "none") else None


ToolChoiceField = Annotated[
    Annotated[ToolChoice, Tag("form:mode")] | Annotated[NamedTool, Tag("form:tool")],
    Discriminator(
        _choice_form,
        custom_error_type="choice_form",
        custom_error_message='must be {"type": "auto"}, "any", "none", or {"type": "tool", "name": …}',
    ),
]


class Thinking(StrictModel):
    """Switch of the model's reasoning, if its template has a switch."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="no separate limit: reasoning counts towards `max_tokens`", json_schema_extra=ACCEPTED
    )
    display: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="`omitted` hides reasoning, any other value shows it unchanged"
    )

    @property
    def is_on(self) -> bool:
        return self.type != "disabled"

    def without_effect(self) -> Iterator[str]:
        """Yield `display` as well if its value is newer than this server; then reasoning is shown as usual."""
        yield from super().without_effect()
        if self.display not in (None, "summarized", "omitted"):
            yield "display"


class OutputFormat(StrictModel):
    """A format of the response: JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(StrictModel):
    """The format of the response, and the effort of reasoning."""

    format: OutputFormat | None = None
    effort: ReasoningEffort | None = None


class Metadata(StrictModel):
    """The user of the client."""

    user_id: Annotated[str, Field(max_length=1024)] | None = None


# Edits that only shorten a prompt. A response to the whole conversation is right without them.
_EDITS = ("clear_thinking_", "clear_tool_uses_", "compact_")


def _known_edits(value: dict[str, Any]) -> dict[str, Any]:
    edits = value.get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith(_EDITS):
            known = ", ".join(f"{name}…" for name in _EDITS)
            raise FieldError("context_management", f"contains an edit of type '{str(kind)[:64]}'; supported: {known}")
    return value


class _Conversation(SamplingFields):
    """Fields that both requests have: all parts of the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="the conversation; blocks are `text`, `thinking`, `tool_use` and `tool_result`. If the "
        "last block is an assistant's text, the completion continues it"
    )
    system: Text | None = Field(None, description="the system message, as text or as blocks of text")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="tools that the client runs; tools of Anthropic's servers are ignored: they are not "
        "offered to the model",
    )
    tool_choice: ToolChoiceField | None = Field(
        None,
        description="`auto` (the default with tools), `any`, `none`, or one by name; forced calls match it",
    )
    thinking: Thinking | None = Field(
        None,
        description="off without it and without an `effort`, if the template has a switch; `display: "
        "omitted` hides reasoning",
    )
    output_config: OutputConfig | None = Field(
        None,
        description="`format`: JSON that matches a schema; `effort`: as `reasoning_effort` of chat "
        "completions, unless `thinking` turns reasoning off",
    )
    context_management: Annotated[JsonObject, AfterValidator(_known_edits)] | None = Field(
        None,
        description="`edits` that clear or compact: nothing is removed from the prompt",
        json_schema_extra=IGNORED,
    )
    cache_control: CacheControlField = None
    speed: Annotated[str, Field(max_length=64)] | None = Field(
        "standard", description="there is one speed", json_schema_extra=IGNORED
    )
    container: Any = Field(None, description="no code is run here", json_schema_extra=IGNORED)
    mcp_servers: Annotated[list[JsonObject], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="no tools are called here: connect them in the client", json_schema_extra=IGNORED
    )
    diagnostics: JsonObject | None = Field(
        None, description="there are none; `usage` has the cached tokens", json_schema_extra=IGNORED
    )
    fallbacks: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="there is one model", json_schema_extra=IGNORED
    )
    inference_geo: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="only `global`: a request cannot choose the server's region"
    )
    user_profile_id: Annotated[str, Field(max_length=256)] | None = Field(None, json_schema_extra=ACCEPTED)
    workspace_id: Annotated[str, Field(max_length=256)] | None = Field(None, json_schema_extra=ACCEPTED)
    response_format: ResponseFormat | None = Field(None, description="refused: use `output_config.format`")
    n: Annotated[int, Field(ge=1, le=1), WHOLE] | None = Field(1, description="there is one completion")
    user: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="the same as `metadata.user_id`, which takes precedence", json_schema_extra=ACCEPTED
    )

    @model_validator(mode="before")
    @classmethod
    def _named_refusals(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, (nothing, instead) in _ELSEWHERE.items():
            if value.get(name) is not None and value[name] != nothing:
                raise FieldError(name, f"is not supported by /v1/messages: {instead}")
        if value.get("inference_geo") not in (None, "global"):
            raise FieldError("inference_geo", "is not supported; leave it out")
        return value

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = [tool.name for tool in self.own_tools]
        twice = next((name for position, name in enumerate(names) if name in names[:position]), None)
        if twice is not None:
            raise FieldError("tools", f"contains two tools with the name '{twice}'")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.name not in names:
            raise FieldError("tool_choice", f"forces the tool '{choice.name[:64]}', which is not offered to the model")
        if isinstance(choice, ToolChoice) and choice.type == "any" and not names:
            raise FieldError("tool_choice", "forces a call, but no tools are offered to the model")
        return self

    def without_effect(self) -> Iterator[str]:
        """Yield `stream_options` as well: a stream always ends with its usage."""
        yield from super().without_effect()
        if self.stream_options is not None:
            yield "stream_options"

    @property
    def own_tools(self) -> list[MessagesTool]:
        """The tools that the model is offered, which the client runs."""
        return [tool for tool in self.tools or () if isinstance(tool, MessagesTool)]


class MessagesRequest(_Conversation):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] = Field(
        description="token limit of the completion, including reasoning; required, as in Anthropic's API"
    )
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOPS, fail_fast=True),
        ]
        | None
    ) = Field(None, description="the text ends before the earliest match; `stop_sequence` names the match")
    metadata: Metadata | None = Field(  # ty: ignore[incompatible-attribute-override]
        None, description="`user_id`: a hash of it in the request log", json_schema_extra=ACCEPTED
    )
    service_tier: Annotated[str, Field(max_length=64)] | None = Field(  # ty: ignore[incompatible-attribute-override]
        None, description="accepted; there is one tier", json_schema_extra=ACCEPTED
    )


class CountTokensRequest(_Conversation):
    """`POST /v1/messages/count_tokens`."""

    @model_validator(mode="after")
    def _is_not_streamed(self) -> Self:
        if self.stream:
            raise FieldError("stream", "cannot be used when counting tokens: there is nothing to stream")
        return self
