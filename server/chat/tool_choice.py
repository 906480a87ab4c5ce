"""Resolution of `tools` and `tool_choice`: tools in the prompt, callable tools, and whether a call is required."""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import ToolCallStart
from oarlock.server.chat.tool_parsers.grammar import MAX_CALLS, SpecialIds
from oarlock.server.schemas.chat import AllowedChoice, ChatRequest, NamedChoice, Tool

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class RequestTools:
    """Tools of one request."""

    format: ToolFormat
    tools: tuple[Tool, ...]  # tools in the prompt
    callable: tuple[Tool, ...]
    must_call: bool
    is_named: bool  # the caller named the function to call
    parallel: bool
    num_earlier: int = 0  # number of calls in the conversation so far

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates expect them."""
        return [tool.for_template() for tool in self.tools]

    def parser(self, *, parallel: bool | None = None) -> ToolParser:
        """Return a parser for the calls of one response. `parallel`: whether it accepts several calls."""
        return self.format.parser(
            {tool.function.name: tool.function.parameters or _NO_PARAMETERS for tool in self.callable},
            self.parallel if parallel is None else parallel,
        )

    def with_id(self, call: ToolCallStart, number: int) -> ToolCallStart:
        """Return the call with the id that the template will show, if the format has its own id notation.

        `number`: number of calls before it in the response.
        """
        make = self.format.call_id
        return call if make is None else replace(call, id=make(call.name, self.num_earlier + number))

    @property
    def is_strict(self) -> bool:
        """Whether calls that are not forced must match their schema too."""
        return any(tool.function.strict for tool in self.callable)

    def call_rules(self, special_ids: SpecialIds) -> str:
        """Return the grammar rule `calls` and the rules that it depends on."""
        tools = [(tool.function.name, tool.function.parameters or _NO_PARAMETERS) for tool in self.callable]
        most = MAX_CALLS if self.parallel and not self.is_named else 1
        return self.format.forced_calls(tools, most, special_ids)


def resolve_tool_choice(request: ChatRequest, tool_format: ToolFormat) -> RequestTools | None:
    """Resolve `tools` and `tool_choice`; None if nothing can be called. Raises `RequestError` if they contradict."""
    choice, tools = request.tool_choice, request.functions
    if not tools:
        if choice in (None, "none", "auto"):
            return None
        raise RequestError(
            "'tool_choice' requires a tool call, but there are no tools. Send 'tools', or leave 'tool_choice' out.",
            "tool_choice",
        )
    parallel = request.parallel_tool_calls is not False
    num_earlier = sum(len(message.tool_calls or ()) for message in request.messages)
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        return RequestTools(tool_format, tools, _named(tools, choice), True, True, parallel, num_earlier)
    must_call = choice == "required"
    if isinstance(choice, AllowedChoice):
        tools = tuple(tool for wanted in choice.allowed_tools.tools for tool in _named(tools, wanted))
        must_call = choice.allowed_tools.mode == "required"
    if not tool_format.is_parsed and not must_call:
        message = (
            "The tool call format that this model's chat template describes is not known. Use tool_choice "
            "'required' or a named function, for which the server defines the format. The operator can "
            "name a format with --tool-call-parser."
        )
        raise RequestError(message, "tool_choice", "unsupported_parameter")
    return RequestTools(tool_format, tools, tools, must_call, False, parallel, num_earlier)


def _named(tools: tuple[Tool, ...], wanted: NamedChoice) -> tuple[Tool, ...]:
    """Return the tool with the wanted name, as a tuple of one. Raises `RequestError` if there is none."""
    name = wanted.function.name
    found = tuple(tool for tool in tools if tool.function.name == name)
    if not found:
        message = f"'tool_choice' names the function '{name[:64]}', which is not in 'tools'."
        raise RequestError(message, "tool_choice")
    return found
