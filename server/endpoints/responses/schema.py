"""The request of `/v1/responses`, field for field, and its input items: messages, calls, results, thoughts, ids.

Sampling fields are those of the other endpoints. Fields of the official types for what this server does not do take
only the values that ask for nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.endpoints.chat.schema import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    JsonObject,
    ToolName,
    choice_form,
    content_form,
)
from oarlock.server.endpoints.schema import JsonSchema, ResponseFormat, SamplingFields
from oarlock.server.strict_model import ACCEPTED, INT32_MAX, MAX_LOGPROBS, WHOLE, FieldError, StrictModel


def _only(place: str, name: str, *neutral: Any) -> Callable[[Any], Any]:
    """`place`: the parameter that the error names."""

    def check(value: Any) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in (None, *neutral)):
            raise FieldError(place, f"has '{name}', which is not supported here; leave it out")
        return value

    return check


# Of functions: each is called by the model itself, at once, and its result is text.
AllowedCallers = Annotated[Any, AfterValidator(_only("tools", "allowed_callers", ["direct"]))]
DeferLoading = Annotated[Any, AfterValidator(_only("tools", "defer_loading", False))]
OutputSchema = Annotated[Any, AfterValidator(_only("tools", "output_schema"))]
AsyncTool = Annotated[Any, AfterValidator(_only("tools", "async", False))]
# Of calls and their results.
Caller = Annotated[Any, AfterValidator(_only("input", "caller", {"type": "direct"}))]
Namespace = Annotated[Any, AfterValidator(_only("input", "namespace"))]
AsyncCall = Annotated[Any, AfterValidator(_only("input", "async", False))]
CacheBreakpoint = Annotated[Any, AfterValidator(_only("input", "prompt_cache_breakpoint"))]
# Of the reasoning: which thoughts a template shows is for the template to say.
ReasoningContext = Annotated[Any, AfterValidator(_only("reasoning", "reasoning.context", "auto"))]
ReasoningMode = Annotated[Any, AfterValidator(_only("reasoning", "reasoning.mode", "standard"))]


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
    """Output of a function that was called."""

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
    """Reasoning of an earlier answer. `encrypted_content`, if there is no other, as this server writes it."""

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
    """Recover the text that `sealed` was given. Raises `FieldError`."""
    try:
        if not text.startswith(_SEAL):
            raise ValueError
        return base64.b64decode(text[len(_SEAL) :], validate=True).decode()
    except ValueError:
        problem = "holds encrypted_content that this server did not write; send the item's content, or leave it out"
        raise FieldError("input", problem) from None


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# Official fields of which no value has a meaning here.
REFUSED = ("context_management", "moderation", "access_programs", "image", "prompt_cache_options")
_INCLUDABLE = (LOGPROBS, ENCRYPTED)
# Fields of the other endpoints that mean nothing for one answer in items, with the values that ask for nothing.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "n": (1, "there is one answer; send several requests"),
    "response_format": (None, "say it with 'text.format'"),
    "prompt_logprobs": (None, "ask /v1/completions"),
    "return_token_ids": (False, "ask /v1/completions"),
    "return_tokens_as_token_ids": (False, "ask /v1/completions"),
}


def _tool_type(value: str) -> str:
    if value == "custom":
        problem = "holds a tool of type 'custom', whose input is free text: declare a function with one string instead"
        raise FieldError("tools", problem)
    if value != "function":
        raise FieldError("tools", f"holds a tool of type '{value}'; this server runs no tools: declare functions")
    return value


class FunctionTool(StrictModel):
    """A function that may be called."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_tool_type)]
    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(True, description="calls that the model makes of its own accord match the schema too")
    allowed_callers: AllowedCallers = None
    defer_loading: DeferLoading = None
    output_schema: OutputSchema = None
    async_: AsyncTool = Field(None, alias="async")


class ChosenTool(StrictModel):
    """A function by name."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_tool_type)]
    name: str


class ResponsesAllowedTools(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_CALLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("form:word")]
    | Annotated[ChosenTool, Tag("form:named")]
    | Annotated[ResponsesAllowedTools, Tag("form:allowed")],
    Discriminator(
        choice_form,
        custom_error_type="choice_form",
        custom_error_message=(
            'must be "none", "auto", "required", {"type": "function", "name": …} or {"type": "allowed_tools", …}'
        ),
    ),
]


class TextFormat(StrictModel):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: Annotated[str, Field(max_length=16 * 1024)] | None = Field(None, json_schema_extra=ACCEPTED)
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, json_schema_extra=ACCEPTED)

    @model_validator(mode="after")
    def _schema_fits_type(self) -> TextFormat:
        is_schema = self.type == "json_schema"
        if is_schema and self.schema_ is None:
            raise FieldError("text", "has a format of type json_schema, which needs a schema")
        if not is_schema and self.schema_ is not None:
            raise FieldError("text", "has a format with a schema, which only goes with type json_schema")
        return self


class TextConfig(StrictModel):
    """`text`: the form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="other values mean nothing to these models")


class Reasoning(StrictModel):
    """`reasoning`: how much is thought."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="handed to the template; refused if it does not use it"
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="thoughts are given whole, never summarised", json_schema_extra=ACCEPTED
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, json_schema_extra=ACCEPTED)
    context: ReasoningContext = None
    mode: ReasoningMode = None


def _input_form(value: Any) -> str | None:
    return "form:text" if isinstance(value, str) else "form:items" if isinstance(value, list) else None


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("form:text")]
        | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("form:items")],
        Discriminator(
            _input_form, custom_error_type="input_form", custom_error_message="must be a string or a list of items"
        ),
    ] = Field(
        description="the conversation, or the user's one message; items: `message` with text, `function_call`, "
        "`function_call_output`, `reasoning`, `item_reference`"
    )
    instructions: str | None = Field(None, description="the system message; not taken over by the next response")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="a ceiling, thoughts included; without one, what the context has room for"
    )
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that may be called; tools that a server would run are refused"
    )
    tool_choice: ToolChoice | None = Field(
        None, description="`none`, `auto` (the default with tools), `required`, one by name, or `allowed_tools`"
    )
    parallel_tool_calls: bool | None = Field(True, description="false: at most one call")
    max_tool_calls: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="of tools that the server runs: there are none", json_schema_extra=ACCEPTED
    )
    text: TextConfig | None = Field(None, description="`format`: plain text, JSON, or JSON that matches a schema")
    reasoning: Reasoning | None = Field(None, description="how much is thought")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables for the template, such as `enable_thinking`; 16 KiB at most"
    )
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] | None = Field(
        None,
        description=f"`{LOGPROBS}`, for answers that are plain text; `{ENCRYPTED}`, the thoughts in base64 for clients "
        "that send them back",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description=f"so many alternatives with every token; needs `{LOGPROBS}`"
    )
    previous_response_id: ItemId | None = Field(
        None, description="the conversation goes on from this response; an error if it is not stored any more"
    )
    store: bool | None = Field(
        None, description="keep the response for `previous_response_id`: the default where storing is switched on"
    )
    background: bool | None = Field(False, description="only false: a response is answered to the one who asks")
    truncation: Literal["disabled"] | None = Field(
        "disabled", description="`auto` is refused: what is dropped is for the caller to choose"
    )
    conversation: None = Field(None, description="refused: send the items, or `previous_response_id`")
    prompt: None = Field(None, description="refused: there are no stored prompts")
    n: Annotated[int, Field(ge=1, le=1), WHOLE] | None = Field(1, description="there is one answer")
    response_format: ResponseFormat | None = Field(None, description="refused: `text.format` says it")
    prompt_logprobs: int | None = Field(None, description="refused: /v1/completions has them")
    return_token_ids: bool | None = Field(False, description="refused: /v1/completions has them")
    return_tokens_as_token_ids: bool | None = Field(False, description="refused: /v1/completions has them")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="in the response again, used for nothing", json_schema_extra=ACCEPTED)
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = Field(None, json_schema_extra=ACCEPTED)
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="accepted; equal beginnings of prompts are found without it", json_schema_extra=ACCEPTED
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(None, json_schema_extra=ACCEPTED)

    @model_validator(mode="before")
    @classmethod
    def _named_refusals(cls, value: Any) -> Any:
        """Refuse by name what a reader of the API may well ask for and does not get, each with what to do."""
        if not isinstance(value, dict):
            return value
        if value.get("background"):
            raise FieldError("background", "is not supported: responses are not kept running; use stream: true")
        if value.get("truncation") == "auto":
            raise FieldError("truncation", "'auto' is refused: drop the items that matter least before sending")
        if value.get("conversation") is not None:
            raise FieldError("conversation", "is not supported: send its items, or previous_response_id")
        if value.get("prompt") is not None:
            raise FieldError("prompt", "is not supported: prompts are not stored; send 'input' and 'instructions'")
        for name, (nothing, instead) in _ELSEWHERE.items():
            if value.get(name) is not None and value[name] != nothing:
                raise FieldError(name, f"does not go with /v1/responses: {instead}")
        for name in REFUSED:
            if value.get(name) is not None:
                raise FieldError(name, "is not supported here; leave it out")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        unknown = next((name for name in self.include or () if name not in _INCLUDABLE), None)
        if unknown is not None:
            raise FieldError("include", f"holds '{unknown}'; there are {' and '.join(_INCLUDABLE)}")
        if self.top_logprobs and not self.with_logprobs:
            raise FieldError("top_logprobs", f"needs include: ['{LOGPROBS}']")
        if not self.input and self.previous_response_id is None:
            raise FieldError("input", "is empty; send the user's message")
        return self

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def with_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())
