"""The requests of `/v1/chat/completions` (messages, tools, tool choices), `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, create_model, model_validator

from oarlock.server.schemas.generation import SamplingFields
from oarlock.server.schemas.strict_model import (
    IGNORED,
    INT32_MAX,
    MAX_LOGPROBS,
    MAX_PROMPT_IDS,
    MEDIA_CODES,
    WHOLE,
    FieldError,
    StrictModel,
    TokenId,
)

MAX_PARTS = 1024
MAX_CALLS = 128
MAX_SCHEMA_CHARACTERS = 256 * 1024


def content_form(value: Any) -> str | None:
    """Return the tag of the form of a message's content."""
    return "form:plain" if isinstance(value, str) else "form:parts" if isinstance(value, list) else None


def _text_type(value: str) -> str:
    if value not in ("text", "refusal"):
        problem = f"contains a content part of type '{value}'; only type 'text' is supported"
        raise FieldError("messages", problem, MEDIA_CODES.get(value))
    return value


def _role(value: Any) -> Any:
    if value == "function":
        raise FieldError("messages", "contains the role 'function', which is obsolete: use the role 'tool'")
    return value


def plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` if it can be written as JSON and is not too large. Raises `ValueError`."""
    try:
        size = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise ValueError("NaN and Infinity are not numbers in JSON") from None
    if size > MAX_SCHEMA_CHARACTERS:
        raise ValueError(f"it has {size} characters as JSON; at most {MAX_SCHEMA_CHARACTERS} are accepted")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(plain_json)]
MAX_NAME = 128  # characters of a tool's name
ToolName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]


def num_parts(turns: Iterable[Any]) -> int:
    """Return the number of messages or items of a conversation plus the number of parts of their contents."""
    contents = (getattr(turn, "content", None) for turn in turns)
    return sum(1 + (len(content) if isinstance(content, list) else 0) for content in contents)


class TextPart(StrictModel):
    """The only kind of content part that a text model can read. A refusal is an assistant's own text."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_text_type)]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="after")
    def _has_type_member(self) -> TextPart:
        if self.type not in self.model_fields_set:
            raise FieldError("messages", f"contains a content part of type '{self.type}' without the key '{self.type}'")
        return self


Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    Discriminator(
        content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of text parts"
    ),
]


class CalledFunction(StrictModel):
    """Tool call of an earlier response, with its arguments as the text in which they came."""

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
    annotations: list[Any] | None = None  # sent in OpenAI's own responses; they add no text

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("messages", f"contains tool_calls in a message of the role '{self.role}'")
        if self.role == "tool" and self.tool_call_id is None:
            raise FieldError("messages", "contains a message of the role 'tool' without tool_call_id")
        # Histories hold messages of other servers, with an empty list of calls, or with only reasoning.
        is_answer = self.role == "assistant" and (self.tool_calls is not None or self.reasoning_text is not None)
        if self.content is None and self.refusal is None and not is_answer:
            raise FieldError("messages", "contains a message without content")
        return self

    @property
    def text(self) -> str:
        """The content with its parts joined. If there is no content, the refusal."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal for part in self.content)

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning, from either of its fields."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class FunctionDefinition(StrictModel):
    """Function that a response may call."""

    name: ToolName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionDefinition:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise FieldError("tools", f"contains '{self.name}', whose parameters do not describe an object")
        return self


class Tool(StrictModel):
    """A function that the model is offered."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool as published templates expect it."""
        described = self.function.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
        return {"type": self.type, "function": described}


class HostedTool(StrictModel):
    """A tool that another server runs, or whose input is free text. The model is not offered it."""

    type: Annotated[str, Field(max_length=64)]

    @model_validator(mode="after")
    def _is_no_function(self) -> HostedTool:
        """Refuse functions in another API's format, because the caller expects them to be offered."""
        members = (self.model_extra or {}).keys()
        is_function = bool(members & {"function", "input_schema", "tools"}) or members >= {"name", "parameters"}
        if is_function or self.type in ("function", "namespace"):
            raise FieldError("tools", f"contains a function of type '{self.type}' in an unsupported form")
        return self

    def ignored_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the type: the whole tool is ignored."""
        yield prefix + self.type


def tool_form(value: Any) -> str:
    """Return the tag of the form of a tool: a function, or a tool that is not offered."""
    if not isinstance(value, dict) or value.get("type", "function") == "function":
        return "form:function"
    return "form:hosted"


class FunctionName(StrictModel):
    """A function by name."""

    name: str


class NamedChoice(StrictModel):
    """A choice of one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Some of the tools, and whether the model must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_CALLS)]


class AllowedChoice(StrictModel):
    """A choice that allows only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_form(value: Any) -> str | None:
    """Return the tag of the form of a tool choice."""
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


MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_DOCUMENTS = 256
MAX_VARIABLES_CHARACTERS = 16 * 1024
_LONG_BODY = 1 << 20  # bytes; shorter bodies have tools of about the usual size
_BYTES_PER_TOOL = 2048
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Variables that are set by this server, or by other fields of the request.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
_RESERVED |= {"tokenize", "raise_exception", "strftime_now"}
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="the conversation; content is text or parts of type `text`; `developer` is `system` for templates "
        "that have no such role"
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="former name of `max_completion_tokens`, which takes precedence"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="token limit of the completion, including reasoning; without it, the rest of the context"
    )
    logprobs: bool | None = Field(
        False,
        description="natural logarithms of the raw distribution, before temperature, penalties and filters, with the "
        "true bytes of every token",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="number of alternatives for each token; only with `logprobs`"
    )
    tools: (
        Annotated[
            list[
                Annotated[
                    Annotated[Tool, Tag("form:function")] | Annotated[HostedTool, Tag("form:hosted")],
                    Discriminator(tool_form),
                ]
            ],
            Field(max_length=MAX_TOOLS),
        ]
        | None
    ) = Field(
        None,
        description="functions that may be called; other tools are ignored: they are not offered to the model",
    )
    tool_choice: ToolChoiceOption | None = Field(
        None,
        description="`none`, `auto` (the default with tools), `required`, one by name, or `allowed_tools`; a call that "
        "is required or named always matches the schema of its arguments",
    )
    parallel_tool_calls: bool | None = Field(True, description="false: at most one call")
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the opening of an assistant message; the default, unless a "
        "message is continued",
    )
    continue_final_message: bool | None = Field(
        False, description="the completion continues the last message; not with `add_generation_prompt`"
    )
    chat_template: None = Field(None, description="refused: a template is code, so only the model's own is used")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables for the template, such as `enable_thinking`; 16 KiB at most"
    )
    documents: Annotated[list[JsonObject], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = Field(
        None,
        description="texts for the response, for templates that show documents; each an object such as `doc_id`, "
        "`title` and `text`, with the keys that the template reads",
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="`none` turns reasoning off, other values turn it on, at the nearest level that the "
        "template supports; ignored by models without reasoning",
    )
    verbosity: Verbosity | None = Field("medium", description="ignored: no template uses it", json_schema_extra=IGNORED)

    @model_validator(mode="before")
    @classmethod
    def _no_template(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("chat_template") is not None:
            raise FieldError("chat_template", "is refused: a template is code, so only the model's own is used")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "is only allowed with logprobs: true")
        limit = self.token_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise FieldError("min_tokens", f"is {self.min_tokens}, more than the token limit ({limit})")
        if self.add_generation_prompt and self.continue_final_message:
            raise FieldError("continue_final_message", "cannot be combined with add_generation_prompt: true")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise FieldError("continue_final_message", "cannot continue a message that ends with tool calls")
        self._check_variables()
        self._check_tools()
        return self

    def _check_variables(self) -> None:
        variables = self.chat_template_kwargs or {}
        size = len(json.dumps(variables))
        if size > MAX_VARIABLES_CHARACTERS:
            problem = f"has {size} characters as JSON; at most {MAX_VARIABLES_CHARACTERS} are accepted"
            raise FieldError("chat_template_kwargs", problem)
        for name in variables:
            if name in _RESERVED or not _VARIABLE.fullmatch(name):
                shown = name[:64]
                raise FieldError("chat_template_kwargs", f"contains '{shown}', which a request cannot set")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.functions]
        twice = next((name for position, name in enumerate(names) if name in names[:position]), None)
        if twice is not None:
            raise FieldError("tools", f"contains two functions with the name '{twice}'")

    @property
    def functions(self) -> tuple[Tool, ...]:
        """The tools that the model is offered."""
        return tuple(tool for tool in self.tools or () if isinstance(tool, Tool))

    def kept_bytes(self, num_bytes: int) -> int:
        """Return the bytes of the tools, which are needed to parse the response."""
        return num_bytes if self.tools and num_bytes > _LONG_BODY else len(self.tools or ()) * _BYTES_PER_TOOL

    @property
    def token_limit(self) -> int | None:
        """The limit from either field; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def thinking_switch(self) -> bool | None:
        """True or False to switch thinking on or off; None if the other fields decide."""
        return None

    @property
    def sets_thinking(self) -> bool:
        """True if the caller chose the value of `thinking_switch`."""
        return False

    def name_of(self, field: str) -> str:
        """Return the caller's name for a field of this chat turn."""
        return field

    @property
    def opens_assistant_turn(self) -> bool:
        """True if the prompt ends with the opening of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


# The fields of a chat request that decide its prompt. All other fields would have no effect, so they are left out.
_PROMPT_FIELDS = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "documents",
    "add_special_tokens",
)


class TokenFields(StrictModel):
    """Fields that both kinds of input have in common."""

    model: Annotated[str, Field(max_length=512)] | None = Field(None, description="one of the served model names")
    return_token_strs: bool | None = Field(False, description="`token_strs`: the text of each token")


class TokenizeRequest(TokenFields):
    """`POST /tokenize` of a text."""

    prompt: str = Field(description="the text; `messages` instead tokenizes a conversation")
    add_special_tokens: bool | None = Field(True, description="false: no beginning-of-sequence token")


_chat_fields: dict[str, Any] = {
    name: (ChatRequest.model_fields[name].rebuild_annotation(), ChatRequest.model_fields[name])
    for name in _PROMPT_FIELDS
    if name in ChatRequest.model_fields
}
TokenizeChatRequest = create_model(
    "TokenizeChatRequest", __base__=TokenFields, __doc__="`POST /tokenize` of a conversation.", **_chat_fields
)


class DetokenizeRequest(StrictModel):
    """`POST /detokenize`."""

    model: Annotated[str, Field(max_length=512)] | None = Field(None, description="one of the served model names")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)] = Field(
        description="token ids; special tokens are written by name"
    )


def as_chat(request: StrictModel) -> ChatRequest:
    """Return a chat request that has the same prompt as this `TokenizeChatRequest`."""
    return ChatRequest.model_construct(**{name: getattr(request, name) for name in _chat_fields})
