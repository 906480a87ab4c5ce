"""The Hermes format, of Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

`SMOLLM3` is the format for templates that get the tools in the variable `xml_tools`. `GENERIC` is the format for
templates without tool support: the tools, earlier calls and their results are written into the text of the messages.
`UNKNOWN` is for templates in an unknown format, for which calls can only be forced.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallParser, CallReader
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema

START, END = "<tool_call>", "</tool_call>"
_INSTRUCTIONS = (
    "You can call these functions; each line describes one as JSON:\n{tools}\n"
    "To call one, answer with <tool_call>\n"
    '{{"name": "the function", "arguments": {{"its": "arguments"}}}}\n</tool_call> and nothing else.'
)


class HermesToolParser(ToolParser):
    """Parser of any number of calls, with content before, between and after them."""

    DELIMITERS = (START, END)
    CLOSING = (END,)

    def _reader(self, delimiter: str) -> CallReader:
        return CallParser(self._tools)


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls, with each delimiter on its own line."""
    start, end = grammar.delimiter(START, special_ids), grammar.delimiter(END, special_ids)
    more = f' ("\\n" {start} body){{0,{most - 1}}}' if most > 1 else ""
    rules = [f"calls: {start} tail", f"tail: body{more}", f'body: "\\n" call "\\n" {end}']
    return "\n".join([*rules, *grammar.call_objects(tools, "arguments")])


def calls_as_text(content: str, calls: list[dict[str, Any]]) -> str:
    """Return a text and the calls after it as the model's own text."""
    lines = [content] if content else []
    lines += [f"{START}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls]
    return "\n".join(lines)


def result_as_text(content: str) -> str:
    """Return a result as text of the user."""
    return f"<tool_response>\n{content}\n</tool_response>"


def write_into_messages(messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """Write the tools, calls and results of a conversation as text.

    The list of tools is appended to the system message, calls become text of the assistant, and results text of the
    user.
    """
    written = [_plain(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=lines)
        if written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{instructions}"}
        else:
            written.insert(0, {"role": "system", "content": instructions})
    return written


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls, or its result, as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": result_as_text(message["content"])}
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {"role": message["role"], "content": calls_as_text(message["content"], calls)}


HERMES = ToolFormat(
    name="hermes",
    models="Qwen 2.5 and 3, Hermes, Granite 4, EXAONE 4, Ernie 4.5 Thinking and others",
    aliases=("granite4", "ernie45"),
    example='<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    parser=HermesToolParser,
    delimiters=(START, END),
    marks=(START,),
    forced_calls=_forced_calls,
    optional_calls=partial(grammar.text_then_calls, START),
    calls_as_text=calls_as_text,
)
SMOLLM3 = replace(HERMES, name="smollm3", models="SmolLM3", marks=(), aliases=(), tools_variable="xml_tools")
GENERIC = replace(
    HERMES,
    name="generic",
    models="templates without tools: the prompt describes them as text",
    marks=(),
    aliases=(),
    write_into_messages=write_into_messages,
)
UNKNOWN = replace(HERMES, name="unknown", models="all others", delimiters=(), marks=(), aliases=(), is_parsed=False)
