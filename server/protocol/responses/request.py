"""The request of `/v1/responses`, field for field. Sampling fields are those of the other endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.protocol.base import ACCEPTED, INT32_MAX, MAX_LOGPROBS, WHOLE, FieldError, StrictModel
from oarlock.server.protocol.chat_completion import MAX_MESSAGES, MAX_TOOLS
from oarlock.server.protocol.chat_messages import MAX_CALLS, JsonObject, ToolName, choice_form
from oarlock.server.protocol.responses.items import InputItem, ItemId
from oarlock.server.protocol.responses.unsupported import (
    AllowedCallers,
    AsyncTool,
    DeferLoading,
    OutputSchema,
    ReasoningContext,
    ReasoningMode,
)
from oarlock.server.protocol.sampling import SamplingFields
from oarlock.server.protocol.structured_output import JsonSchema, ResponseFormat

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


class AllowedTools(StrictModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_CALLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("form:word")]
    | Annotated[ChosenTool, Tag("form:named")]
    | Annotated[AllowedTools, Tag("form:allowed")],
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
        if is_schema and (self.name is None or self.schema_ is None):
            raise FieldError("text", "has a format of type json_schema, which needs a name and a schema")
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
        """What a reader of the API may well ask for and does not get, each with what to do."""
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
