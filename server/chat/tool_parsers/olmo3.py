"""OLMo 3's calls in Python's notation between tags, each on its own line: `<function_calls>f(a="x")</function_calls>`.

Values are JSON. `OLMO3_FUNCTIONS` is the format for older templates, which get the tools and calls as texts:
`functions` of the system message and `function_calls` of the assistant's. Results have a role of their own there.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema
from oarlock.server.chat.tool_parsers.pythonic import Lfm2ToolParser, PythonCall, call_rules, call_text, repeated_calls

_START, _END = "<function_calls>", "</function_calls>"


class Olmo3ToolParser(Lfm2ToolParser):
    """Parser of calls between the tags, separated by white space, with other text around the tags."""

    DELIMITERS = (_START, _END)
    CLOSING = (_END,)

    def _head(self, character: str) -> bool:
        self._in_list, self._accept = True, self._list  # a list without brackets
        return self._list(character)

    def _list(self, character: str) -> bool:
        if character.isalpha() or character == "_":
            self._begin_call("".join(self._attempt), PythonCall(self._tools))
            return True
        return character.isspace() or character in ",;"


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls, each on its own line. Raises `RequestError` if a schema cannot be enforced."""
    start, end = grammar.delimiter(_START, special_ids), grammar.delimiter(_END, special_ids)
    lines = repeated_calls(most, "\n")
    return "\n".join([f"calls: {start} tail", f"tail: {lines} {end}", *call_rules(tools)])


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(calls: list[dict[str, Any]]) -> str:
    return "\n".join(call_text(call, _value) for call in calls)


def _calls_as_text(content: str, calls: list[dict[str, Any]]) -> str:
    return f"{content}{_START}{_lines(calls)}{_END}"


def _write_into_messages(messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """Write the tools into the `functions` text of the system message."""
    if not tools:
        return messages
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": _INSTRUCTIONS}
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return [{**first, "functions": json.dumps(tools, ensure_ascii=False)}, *rest]


_INSTRUCTIONS = "You are a helpful function-calling AI assistant."


def _own_turns(messages: Messages) -> Messages:
    """Return the messages with calls as `function_calls` text, and results in their own role."""
    written: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append({**others, "function_calls": _lines(calls)})
        else:
            written.append({**message, "role": "environment"} if message["role"] == "tool" else message)
    return written


OLMO3 = ToolFormat(
    name="olmo3",
    models="OLMo 3",
    example=f'{_START}f(a="x"){_END}',
    parser=Olmo3ToolParser,
    delimiters=(_START, _END),
    marks=(_START, _END),
    forced_calls=_forced_calls,
    optional_calls=partial(grammar.text_then_calls, _START),
    calls_as_text=_calls_as_text,
)
OLMO3_FUNCTIONS = replace(
    OLMO3,
    name="olmo3_functions",
    models="OLMo 3 and OLMo 2, if their template reads `functions` of the messages",
    marks=(),
    calls_as_text=None,
    write_into_messages=_write_into_messages,
    own_turns=_own_turns,
)
