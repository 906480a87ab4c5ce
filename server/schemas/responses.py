"""The requests of `/v1/responses` and `/v1/responses/compact`, field for field. Their input items are in `items`.

The sampling fields are the same as in the other endpoints. An official field that this server does not follow is
reported as ignored if a response is right without it. Otherwise the field accepts only values that have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.schemas.chat import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    HostedTool,
    JsonObject,
    ReasoningEffort,
    ToolName,
    Verbosity,
    choice_form,
    tool_form,
)
from oarlock.server.schemas.generation import JsonSchema, ResponseFormat, SamplingFields
from oarlock.server.schemas.response_items import InputItem, ItemId, Word, accept_only, flat_name
from oarlock.server.schemas.strict_model import (
    ACCEPTED,
    IGNORED,
    INT32_MAX,
    MAX_LOGPROBS,
    MAX_METADATA,
    WHOLE,
    CacheSalt,
    FieldError,
    Priority,
    StrictModel,
    Timeout,
    User,
    at_most,
)

AsyncTool = Annotated[Any, AfterValidator(accept_only("tools", "async", False))]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# Official fields without which a response would be wrong, or lack a requested part.
REFUSED = ("moderation", "access_programs", "image")
_INCLUDABLE = (LOGPROBS, ENCRYPTED)
# Fields of the other endpoints that mean nothing for one response of items, with the values that have no effect.
_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "n": (1, "there is one completion; send several requests"),
    "response_format": (None, "use 'text.format'"),
    "prompt_logprobs": (None, "use /v1/completions"),
    "return_token_ids": (False, "use /v1/completions"),
    "return_tokens_as_token_ids": (False, "use /v1/completions"),
}


class FunctionTool(StrictModel):
    """A function that may be called."""

    type: Literal["function"]
    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(True, description="calls that the model makes by itself also match the schema")
    allowed_callers: Annotated[list[Word], Field(max_length=16)] | None = None
    defer_loading: bool | None = Field(None, json_schema_extra=IGNORED)  # the model sees the function at once
    output_schema: Any = Field(None, json_schema_extra=IGNORED)
    async_: AsyncTool = Field(None, alias="async")

    @model_validator(mode="after")
    def _model_may_call(self) -> FunctionTool:
        if self.allowed_callers and "direct" not in self.allowed_callers:
            problem = f"contains '{self.name}', whose allowed_callers leave out 'direct': no program is run here"
            raise FieldError("tools", problem)
        return self


class NamespaceTool(StrictModel):
    """A group of tools. The model knows its functions as `NAMESPACE__NAME`, as in vLLM."""

    type: Literal["namespace"]
    name: ToolName
    # Description of the group; each function has its own.
    description: Annotated[str, Field(max_length=65_536)] | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("form:function")] | Annotated[HostedTool, Tag("form:hosted")],
                Discriminator(tool_form),
            ]
        ],
        Field(max_length=MAX_TOOLS),
    ]

    @model_validator(mode="after")
    def _names_fit(self) -> NamespaceTool:
        for tool in self.functions:
            if len(flat_name(self.name, tool.name)) > MAX_NAME:
                problem = (
                    f"contains a namespace with which the name of its function '{tool.name}' has more "
                    f"than {MAX_NAME} characters"
                )
                raise FieldError("tools", problem)
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        """The functions of the group."""
        return [tool for tool in self.tools if isinstance(tool, FunctionTool)]

    def ignored_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the ignored fields of its tools in the same way as for tools outside of a group."""
        for tool in self.tools:
            yield from tool.ignored_fields(prefix)


def _tool_form(value: Any) -> str:
    return "form:namespace" if isinstance(value, dict) and value.get("type") == "namespace" else tool_form(value)


Tool = Annotated[
    Annotated[FunctionTool, Tag("form:function")]
    | Annotated[NamespaceTool, Tag("form:namespace")]
    | Annotated[HostedTool, Tag("form:hosted")],
    Discriminator(_tool_form),
]


class ChosenTool(StrictModel):
    """A function by name."""

    type: Literal["function"]
    name: str


class AllowedTool(StrictModel):
    """A tool that may be called: a function by name, or a hosted tool, which is ignored."""

    type: Word
    name: str | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> AllowedTool:
        if self.type == "function" and self.name is None:
            raise FieldError("tool_choice", "contains a function without a name")
        return self

    def ignored_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the type of a hosted tool."""
        if self.type == "function":
            yield from super().ignored_fields(prefix)
        else:
            yield prefix + self.type


class ResponsesAllowedTools(StrictModel):
    """A choice that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_CALLS)]

    @property
    def names(self) -> list[str]:
        """The names of the functions in `tools`."""
        return [tool.name for tool in self.tools if tool.type == "function" and tool.name is not None]


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
    """The format of the response's text."""

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
            raise FieldError("text", "has a format with a schema, which needs type json_schema")
        return self


class TextConfig(StrictModel):
    """`text`: the format of the response."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = Field("medium", description="ignored: no template uses it", json_schema_extra=IGNORED)


class Reasoning(StrictModel):
    """`reasoning`: the effort of reasoning."""

    effort: ReasoningEffort | None = Field(None, description="as `reasoning_effort` of chat completions")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="reasoning is returned complete, never summarized", json_schema_extra=ACCEPTED
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, json_schema_extra=ACCEPTED)
    # The chat template decides which reasoning is kept in context.
    context: Word | None = Field("auto", json_schema_extra=IGNORED)
    mode: Word | None = Field("standard", json_schema_extra=IGNORED)


def _known_edits(value: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for edit in value:
        if edit.get("type") != "compaction":
            raise FieldError("context_management", f"contains '{str(edit.get('type'))[:64]}'; supported: compaction")
    return value


def _no_prewarming(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("prewarm"):
        raise FieldError("prompt_cache_options", "requests a cache warm-up without a response; leave 'prewarm' out")
    return value


def _input_form(value: Any) -> str | None:
    return "form:text" if isinstance(value, str) else "form:items" if isinstance(value, list) else None


def _refuse_by_name(value: dict[str, Any]) -> None:
    """Raise `FieldError` for fields without which any response would be wrong, with a remedy for each."""
    if value.get("background"):
        raise FieldError("background", "is not supported: a response ends with its request; use stream: true")
    if value.get("conversation") is not None:
        raise FieldError("conversation", "is not supported: send its items, or previous_response_id")
    if value.get("prompt") is not None:
        raise FieldError("prompt", "is not supported: prompts are not stored; send 'input' and 'instructions'")
    for name in REFUSED:
        if value.get(name) is not None:
            raise FieldError(name, "is not supported; leave it out")


Input = Annotated[
    Annotated[str, Tag("form:text")]
    | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("form:items")],
    Discriminator(
        _input_form, custom_error_type="input_form", custom_error_message="must be a string or a list of items"
    ),
]


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    input: Input = Field(
        description="the conversation, or the user's one message; items: `message` with text, `function_call`, "
        "`function_call_output`, `reasoning`, `compaction`, `item_reference`"
    )
    instructions: str | None = Field(None, description="the system message; the next response does not inherit it")
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="token limit of the response, including reasoning; without it, the rest of the context"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None,
        description="functions that may be called, also in a `namespace`; other tools are ignored: they "
        "are not offered to the model",
    )
    tool_choice: ToolChoice | None = Field(
        None, description="`none`, `auto` (the default with tools), `required`, one by name, or `allowed_tools`"
    )
    parallel_tool_calls: bool | None = Field(True, description="false: at most one call")
    max_tool_calls: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="limit for tools that the server runs: there are none", json_schema_extra=ACCEPTED
    )
    text: TextConfig | None = Field(None, description="`format`: plain text, JSON, or JSON that matches a schema")
    reasoning: Reasoning | None = Field(None, description="amount of reasoning")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables for the template, such as `enable_thinking`; 16 KiB at most"
    )
    include: Annotated[list[Word], Field(max_length=16)] | None = Field(
        None,
        description=f"`{LOGPROBS}`, for the visible text; `{ENCRYPTED}`, the reasoning in base64 for "
        "clients that send it back; parts of hosted tools' calls are ignored",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description=f"number of alternatives for each token; needs `{LOGPROBS}`"
    )
    previous_response_id: ItemId | None = Field(
        None, description="continue the conversation after this response; an error if it is no longer stored"
    )
    store: bool | None = Field(
        None, description="store the response for `previous_response_id`: the default if storing is enabled"
    )
    background: bool | None = Field(
        False, description="only false: the response is always sent to the requesting client"
    )
    truncation: Literal["disabled", "auto"] | None = Field(
        "disabled",
        description="`auto` is ignored: a conversation that does not fit is refused, since only the client "
        "knows which items matter least",
        json_schema_extra=IGNORED,
    )
    context_management: Annotated[list[JsonObject], AfterValidator(_known_edits)] | None = Field(
        None,
        description="`compaction`: only /v1/responses/compact compacts a conversation",
        json_schema_extra=IGNORED,
    )
    prompt_cache_options: Annotated[JsonObject, AfterValidator(_no_prewarming)] | None = Field(
        None, description="equal prompt prefixes are found without it", json_schema_extra=IGNORED
    )
    conversation: None = Field(None, description="refused: send the items, or `previous_response_id`")
    prompt: None = Field(None, description="refused: there are no stored prompts")
    n: Annotated[int, Field(ge=1, le=1), WHOLE] | None = Field(1, description="there is one completion")
    response_format: ResponseFormat | None = Field(None, description="refused: use `text.format`")
    prompt_logprobs: int | None = Field(None, description="refused: use /v1/completions")
    return_token_ids: bool | None = Field(False, description="refused: use /v1/completions")
    return_tokens_as_token_ids: bool | None = Field(False, description="refused: use /v1/completions")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
            at_most(MAX_METADATA),
        ]
        | None
    ) = Field(None, description="returned with the response, otherwise unused", json_schema_extra=ACCEPTED)
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = Field(None, json_schema_extra=ACCEPTED)
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="accepted; equal prompt prefixes are found without it", json_schema_extra=ACCEPTED
    )
    prompt_cache_retention: Word | None = Field(None, json_schema_extra=ACCEPTED)

    @model_validator(mode="before")
    @classmethod
    def _named_refusals(cls, value: Any) -> Any:
        """Refuse fields that clients of the API may expect and that are not supported, with a remedy for each."""
        if not isinstance(value, dict):
            return value
        _refuse_by_name(value)
        for name, (nothing, instead) in _ELSEWHERE.items():
            if value.get(name) is not None and value[name] != nothing:
                raise FieldError(name, f"is not supported by /v1/responses: {instead}")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        choice = self.tool_choice
        if isinstance(choice, ResponsesAllowedTools) and choice.mode == "required" and not choice.names:
            raise FieldError("tool_choice", "forces a call of tools that are not offered to the model")
        if self.top_logprobs and not self.with_logprobs:
            raise FieldError("top_logprobs", f"needs include: ['{LOGPROBS}']")
        if not self.input and self.previous_response_id is None:
            raise FieldError("input", "is empty; send the user's message")
        return self

    def without_effect(self) -> Iterator[str]:
        """Yield values of `include` as well if they name parts of calls that no response of this server has."""
        yield from super().without_effect()
        yield from (f"include.{name}" for name in self.include or () if name not in _INCLUDABLE)

    @property
    def functions(self) -> dict[str, tuple[FunctionTool, str | None]]:
        """The functions that the model is offered: name -> function, and its namespace. Raises `FieldError`."""
        found: dict[str, tuple[FunctionTool, str | None]] = {}
        for tool in self.tools or ():
            space = tool.name if isinstance(tool, NamespaceTool) else None
            members = tool.functions if isinstance(tool, NamespaceTool) else [tool]
            for one in members:
                if isinstance(one, FunctionTool):
                    name = flat_name(space, one.name)
                    if name in found:
                        raise FieldError("tools", f"contains two functions with the name '{name}'")
                    found[name] = (one, space)
        return found

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def with_encrypted(self) -> bool:
        return ENCRYPTED in (self.include or ())


class CompactRequest(StrictModel):
    """`POST /v1/responses/compact`."""

    model: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="one of the served model names; without it the first; unknown: 404"
    )
    input: Input | None = Field(None, description="the conversation, in the items of /v1/responses")
    instructions: str | None = Field(None, description="the system message; not part of the response")
    previous_response_id: ItemId | None = Field(
        None, description="the conversation begins with the items of this response"
    )
    timeout: Timeout = None
    priority: Priority = 0
    cache_salt: CacheSalt = None
    user: User = None
    stream: bool | None = Field(False, description="only false: a compaction is not streamed")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="ignored: no tool is called for a summary", json_schema_extra=IGNORED
    )
    tool_choice: ToolChoice | None = Field(None, json_schema_extra=IGNORED)
    parallel_tool_calls: bool | None = Field(True, json_schema_extra=ACCEPTED)
    reasoning: Reasoning | None = Field(
        None,
        description="ignored: a summary is written without reasoning, if it can be turned off",
        json_schema_extra=IGNORED,
    )
    text: TextConfig | None = Field(None, description="ignored: a summary is plain text", json_schema_extra=IGNORED)
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(None, json_schema_extra=ACCEPTED)
    prompt_cache_options: Annotated[JsonObject, AfterValidator(_no_prewarming)] | None = Field(
        None, json_schema_extra=IGNORED
    )
    prompt_cache_retention: Word | None = Field(None, json_schema_extra=ACCEPTED)
    service_tier: Word | None = Field(None, description="accepted; there is one tier", json_schema_extra=ACCEPTED)

    @model_validator(mode="before")
    @classmethod
    def _named_refusals(cls, value: Any) -> Any:
        if isinstance(value, dict):
            _refuse_by_name(value)
        return value

    @model_validator(mode="after")
    def _can_be_compacted(self) -> Self:
        if self.stream:
            raise FieldError("stream", "is true, but a compaction is not streamed; leave it out")
        if not self.input and self.previous_response_id is None:
            raise FieldError("input", "is empty; send the conversation to compact")
        return self
