"""What a request's `tools` and `tool_choice` come to: what the model is shown, what it may call, whether it must.

Knows the wire types and the formats. Knows nothing of prompts' text or of answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from server.chat.tool_parsers import grammar
from server.chat.tool_parsers.base import HermesToolParser, ToolParser
from server.chat.tool_parsers.registry import ToolFormat
from server.protocol.chat_completion import ChatRequest
from server.protocol.chat_messages import AllowedChoice, NamedChoice, Tool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tools of one request."""

    form: ToolFormat
    shown: tuple[Tool, ...]  # to the model
    callable: tuple[Tool, ...]
    must_call: bool
    is_named: bool  # the caller named the one to call
    parallel: bool

    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.shown]

    def reader(self) -> ToolParser:
        """Reads the calls in one answer."""
        make = self.form.reader or HermesToolParser
        return make(frozenset(tool.function.name for tool in self.callable), self.parallel)

    @property
    def is_strict(self) -> bool:
        """A call that the model makes of its own accord must match its schema too."""
        return any(tool.function.strict for tool in self.callable)

    def rules(self, marks: Mapping[str, int]) -> str:
        """The grammar rule `calls`, and what it needs. `marks`: special ids by name."""
        tools = [(tool.function.name, tool.function.parameters or _NOTHING) for tool in self.callable]
        return grammar.forced(self.form, tools, self.parallel and not self.is_named, marks)


_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def plan_tools(request: ChatRequest, form: ToolFormat) -> ToolPlan | None:
    """The plan, or None when nothing can be called. Raises `RequestError`."""
    choice, tools = request.tool_choice, tuple(request.tools or ())
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError("'tool_choice' asks for a call, and there are no tools.", "tool_choice")
    parallel = request.parallel_tool_calls is not False
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        return ToolPlan(form, tools, _named(tools, choice), True, True, parallel)
    must_call = choice == "required"
    if isinstance(choice, AllowedChoice):
        tools = tuple(tool for wanted in choice.allowed_tools.tools for tool in _named(tools, wanted))
        must_call = choice.allowed_tools.mode == "required"
    if form.reader is None and not must_call:
        message = (
            "This model writes tool calls in a form that this server cannot read. Use tool_choice 'required' or name "
            "the function: such calls are written in a form of the server's own."
        )
        raise RequestError(message, "tool_choice", "unsupported_parameter")
    return ToolPlan(form, tools, tools, must_call, False, parallel)


def _named(tools: tuple[Tool, ...], wanted: NamedChoice) -> tuple[Tool, ...]:
    name = wanted.function.name
    found = tuple(tool for tool in tools if tool.function.name == name)
    if not found:
        message = f"'tool_choice' names the function '{name[:64]}', which is not among the tools."
        raise RequestError(message, "tool_choice")
    return found
