"""The request of `/v1/chat/completions`, field for field."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oarlock.server.protocol.base import INT32_MAX, MAX_LOGPROBS, WHOLE, FieldError
from oarlock.server.protocol.chat_messages import ChatMessage, JsonObject, Tool, ToolChoiceOption
from oarlock.server.protocol.sampling import SamplingFields

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_VARIABLES_CHARACTERS = 16 * 1024
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Set by this server, or by other fields of the request.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
_RESERVED |= {"tokenize", "raise_exception", "strftime_now", "reasoning_effort"}


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="the conversation; content is text or parts of type `text`; `developer` is `system` for templates "
        "that have no such role"
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="the older name of `max_completion_tokens`, which wins"
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="a ceiling, thoughts included; without one, what the context has room for"
    )
    logprobs: bool | None = Field(
        False,
        description="natural logarithms of the raw distribution, before temperature, penalties and filters, with the "
        "true bytes of every token",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="so many alternatives with every token; only with `logprobs`"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="functions that may be called; an empty list is none"
    )
    tool_choice: ToolChoiceOption | None = Field(
        None,
        description="`none`, `auto` (the default with tools), `required`, one by name, or `allowed_tools`; a call that "
        "is required or named always matches the schema of its arguments",
    )
    parallel_tool_calls: bool | None = Field(True, description="false: at most one call")
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the assistant's opening; the default, unless a message is continued"
    )
    continue_final_message: bool | None = Field(
        False, description="the answer goes on with the last message; not with `add_generation_prompt`"
    )
    chat_template: None = Field(None, description="refused: a template is code, and it comes with the model")
    chat_template_kwargs: JsonObject | None = Field(
        None, description="variables for the template, such as `enable_thinking`; 16 KiB at most"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="handed to the template; refused if it does not use it"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_template(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("chat_template") is not None:
            raise FieldError("chat_template", "is refused: a template is code, and only the model's own is run")
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
            problem = f"has {size} characters as JSON, at most {MAX_VARIABLES_CHARACTERS} are accepted"
            raise FieldError("chat_template_kwargs", problem)
        for name in variables:
            if name in _RESERVED or not _VARIABLE.fullmatch(name):
                shown = name[:64]
                raise FieldError("chat_template_kwargs", f"holds '{shown}', which is not a name for the caller to set")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for position, name in enumerate(names) if name in names[:position]), None)
        if twice is not None:
            raise FieldError("tools", f"holds two functions with the name '{twice}'")

    @property
    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def opens_answer(self) -> bool:
        """The prompt ends with the opening of the assistant's message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt
