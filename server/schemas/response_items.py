"""Input items of `/v1/responses`: messages, calls and outputs, reasoning, summaries, ids, and calls of other tools.

A model reads only calls of functions, so calls of other kinds are converted to function calls. Items without text for
the model are accepted and reported as ignored. Items that the model would need and cannot read are refused by type.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from oarlock.server.schemas.chat import MAX_PARTS, JsonObject, ToolName, content_form
from oarlock.server.schemas.strict_model import ACCEPTED, MEDIA_CODES, FieldError, StrictModel


def accept_only(param: str, name: str, *neutral: Any) -> Callable[[Any], Any]:
    """Return a validator that accepts only None and `neutral` values. `param`: the parameter named in the error."""

    def check(value: Any) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in (None, *neutral)):
            raise FieldError(param, f"has '{name}', which is not supported; leave it out")
        return value

    return check


# Types of fields that calls and their results have.
Caller = Annotated[Any, AfterValidator(accept_only("input", "caller", {"type": "direct"}))]
AsyncCall = Annotated[Any, AfterValidator(accept_only("input", "async", False))]
Word = Annotated[str, Field(max_length=64)]
ItemId = Annotated[str, Field(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_TEXT_PARTS = ("input_text", "output_text", "text")


def _part_type(value: str) -> str:
    if value not in (*_TEXT_PARTS, "refusal"):
        problem = f"contains a part of type '{value}'; only text is supported, type 'input_text'"
        raise FieldError("input", problem, MEDIA_CODES.get(value))
    return value


class ContentPart(StrictModel):
    """A part of a message or of a call's result. A refusal is an assistant's own text."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_part_type)]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None  # sent in responses; they add no text
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = Field(None, json_schema_extra=ACCEPTED)  # equal prefixes are found without it

    @model_validator(mode="after")
    def _has_type_member(self) -> ContentPart:
        member = "refusal" if self.type == "refusal" else "text"
        if member not in self.model_fields_set:
            raise FieldError("input", f"contains a part of type '{self.type}' without the key '{member}'")
        return self


Content = Annotated[
    Annotated[str, Tag("form:plain")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")],
    Discriminator(
        content_form, custom_error_type="content_form", custom_error_message="must be a string or a list of text parts"
    ),
]


def text_of(content: str | list[ContentPart]) -> str:
    """Return the content with its parts joined."""
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def flat_name(namespace: str | None, name: str) -> str:
    """Return the full name of a function: with its namespace, if it has one."""
    return name if namespace is None else f"{namespace}__{name}"


class MessageItem(StrictModel):
    """A turn of the conversation. An assistant's turn comes from a response, or was written by the caller."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(StrictModel):
    """A call in an earlier response."""

    type: Literal["function_call"]
    call_id: ItemId
    name: ToolName
    arguments: str
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: Caller = None
    namespace: ToolName | None = None
    async_: AsyncCall = Field(None, alias="async")

    @property
    def flat_name(self) -> str:
        """The name under which the model knows the function."""
        return flat_name(self.namespace, self.name)


class FunctionCallOutputItem(StrictModel):
    """Output of a function that was called."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: str | None = None  # name of the function, as in the call
    caller: Caller = None
    namespace: ToolName | None = None


class OtherCallItem(StrictModel):
    """A call of a tool that is not a function, from an earlier turn. The model reads it as a call of a function."""

    type: Literal[
        "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "mcp_call", "code_interpreter_call"
    ]
    id: ItemId | None = None
    call_id: ItemId | None = None
    status: Word | None = None
    name: ToolName | None = None
    namespace: ToolName | None = None
    input: str | None = None
    action: JsonObject | None = None
    operation: JsonObject | None = None
    arguments: str | None = None
    code: str | None = None
    output: str | None = None  # set if the call holds its own result
    outputs: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    error: Any = None

    @model_validator(mode="after")
    def _can_be_answered(self) -> OtherCallItem:
        if self.call_id is None and self.id is None:
            raise FieldError("input", f"contains an item of type '{self.type}' without a call_id")
        return self

    @property
    def as_functions(self) -> list[FunctionCallItem | FunctionCallOutputItem]:
        """The call, and its result if the item holds one."""
        call_id = self.call_id or self.id or ""
        name = flat_name(self.namespace, self.name or self.type.removesuffix("_call"))
        given = {"input": self.input, "action": self.action, "operation": self.operation, "code": self.code}
        written = json.dumps({key: value for key, value in given.items() if value is not None}, ensure_ascii=False)
        call = FunctionCallItem(
            type="function_call", call_id=call_id, name=name, arguments=self.arguments or written, id=self.id
        )
        result = next((one for one in (self.output, self.outputs, self.error) if one is not None), None)
        if result is None:
            return [call]
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return [call, FunctionCallOutputItem(type="function_call_output", call_id=call_id, output=text)]


def _output_form(value: Any) -> str | None:
    if isinstance(value, list) and not any(isinstance(part, dict) and "type" in part for part in value):
        return "form:objects"
    return content_form(value)


class OtherCallOutputItem(StrictModel):
    """Output of a tool that is not a function. The model reads it as the output of a function."""

    type: Literal["custom_tool_call_output", "local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    id: ItemId | None = None
    call_id: ItemId | None = None
    status: Word | None = None
    output: (
        Annotated[
            Annotated[str, Tag("form:plain")]
            | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("form:parts")]
            | Annotated[list[JsonObject], Field(max_length=MAX_PARTS), Tag("form:objects")],
            Discriminator(
                _output_form, custom_error_type="content_form", custom_error_message="must be a string or a list"
            ),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _answers_a_call(self) -> OtherCallOutputItem:
        if self.call_id is None and self.id is None:
            raise FieldError("input", f"contains an item of type '{self.type}' without a call_id")
        return self

    @property
    def as_functions(self) -> list[FunctionCallItem | FunctionCallOutputItem]:
        """The output, with objects and a missing output as JSON."""
        output = self.output if self.output is not None else [{"status": self.status or "completed"}]
        if isinstance(output, list) and not any(isinstance(part, ContentPart) for part in output):
            output = json.dumps(output, ensure_ascii=False)
        call_id = self.call_id or self.id or ""
        return [
            FunctionCallOutputItem.model_construct(
                type="function_call_output", call_id=call_id, output=output, id=self.id
            )
        ]


class HostedCallItem(StrictModel):
    """A call that another server ran, without its result. The text after it contains the findings."""

    type: Literal["web_search_call", "file_search_call", "mcp_list_tools"]

    def ignored_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the type: the whole item is ignored."""
        yield prefix + self.type


class ThoughtPart(StrictModel):
    """A piece of the reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier response. `encrypted_content` is used if this server wrote it and
    `content` is missing.
    """

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary if another server encrypted the reasoning. Raises `FieldError`."""
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content is not None and self.encrypted_content.startswith(REASONING):
            return unsealed(self.encrypted_content, REASONING)
        return "".join(part.text for part in self.summary or ())

    def without_effect(self) -> Iterator[str]:
        """Yield `encrypted_content` if another server encrypted it."""
        if self.encrypted_content and not self.content and not self.encrypted_content.startswith(REASONING):
            yield "encrypted_content"


def _own_summary(value: str) -> str:
    """Return `value` if this server wrote it, else raise `FieldError`: the summarised conversation would be missing."""
    if not value.startswith(SUMMARY):
        problem = "contains a compaction that another server encrypted; send the original conversation"
        raise FieldError("input", problem)
    unsealed(value, SUMMARY)
    return value


class CompactionItem(StrictModel):
    """The summary of a conversation, as `/v1/responses/compact` returns it."""

    type: Literal["compaction"]
    id: ItemId | None = None
    encrypted_content: Annotated[str, AfterValidator(_own_summary)]
    created_by: Annotated[str, Field(max_length=1024)] | None = Field(None, json_schema_extra=ACCEPTED)

    @property
    def text(self) -> str:
        """The summary."""
        return unsealed(self.encrypted_content, SUMMARY)


class ItemReference(StrictModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: ItemId


_TYPES = ("message", "function_call", "function_call_output", "reasoning", "compaction", "item_reference")
_OTHER_CALLS = get_args(OtherCallItem.model_fields["type"].annotation)
_OTHER_OUTPUTS = get_args(OtherCallOutputItem.model_fields["type"].annotation)
_HOSTED_CALLS = get_args(HostedCallItem.model_fields["type"].annotation)


def _unread(kind: str) -> str:
    problem = f"contains an item of type '{kind}'; supported: {', '.join(_TYPES)}"
    raise FieldError("input", problem, MEDIA_CODES.get(kind))


class UnreadItem(StrictModel):
    """Any other item, of media or of tools that a server runs. It is refused by its type."""

    type: Annotated[str, Field(max_length=64), AfterValidator(_unread)]


def _item_form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "form:message" if "role" in value or "content" in value else "form:item_reference"
    for form, kinds in (("other", _OTHER_CALLS), ("other_output", _OTHER_OUTPUTS), ("hosted", _HOSTED_CALLS)):
        if kind in kinds:
            return f"form:{form}"
    return f"form:{kind}" if kind in _TYPES else "form:unread"


InputItem = Annotated[
    Annotated[MessageItem, Tag("form:message")]
    | Annotated[FunctionCallItem, Tag("form:function_call")]
    | Annotated[FunctionCallOutputItem, Tag("form:function_call_output")]
    | Annotated[ReasoningItem, Tag("form:reasoning")]
    | Annotated[CompactionItem, Tag("form:compaction")]
    | Annotated[ItemReference, Tag("form:item_reference")]
    | Annotated[OtherCallItem, Tag("form:other")]
    | Annotated[OtherCallOutputItem, Tag("form:other_output")]
    | Annotated[HostedCallItem, Tag("form:hosted")]
    | Annotated[UnreadItem, Tag("form:unread")],
    Discriminator(_item_form, custom_error_type="item_form", custom_error_message="must be an object"),
]

# Prefixes of texts that clients keep for this server. They differ, so that a text is only read as its own kind of item.
REASONING, SUMMARY = "oarlock-text:", "oarlock-summary:"


def sealed(text: str, prefix: str) -> str:
    """Return a text in the format in which clients send it back: base64, not encrypted, because it is their own."""
    return prefix + base64.b64encode(text.encode("utf-8", "replace")).decode()


def unsealed(value: str, prefix: str) -> str:
    """Return the text that `sealed` was given. Raises `FieldError`."""
    try:
        return base64.b64decode(value[len(prefix) :], validate=True).decode()
    except ValueError:
        problem = "contains encrypted_content that was changed; send it unchanged, or leave it out"
        raise FieldError("input", problem) from None
