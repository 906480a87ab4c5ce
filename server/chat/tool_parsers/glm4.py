"""GLM-4's calls: the function's name and its arguments, each on its own line, as a whole turn of the assistant.

A response begins with a call, or contains it after the token of a further turn. In a prompt the name is the turn's
`metadata`, and results have the role `observation`. `GLM4_9B` is the format for the templates of 2024, which get the
tools with the system message.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallReader, CallScript, MalformedError, Steps, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal

_TURN = "<|assistant|>"
_LINE = "\n"


class LinesCall(CallScript):
    """Reader of a name, a line end and the arguments."""

    def _read(self) -> Steps:
        yield from self._space()
        name = yield from self._word()
        between = ""
        while not between or between[-1].isspace():
            between += yield from self._character()
        if _LINE not in between:
            raise MalformedError
        self._back = between[-1]
        yield from self._json_arguments(name)


class Glm4ToolParser(ToolParser):
    """Parser of calls at the start of a response and after the token of a turn."""

    DELIMITERS = (_TURN,)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self._begin_call("", self._reader(""))

    def _reader(self, delimiter: str) -> CallReader:
        return LinesCall(self._tools)


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls with the token of a turn between them."""
    more = f" ({delimiter(_TURN, special_ids)} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call_{index}: {literal(name + _LINE)} args_{index}" for index, (name, _) in enumerate(tools)]
    return "\n".join([f"calls: call{more}", grammar.one_of_calls(tools), *rules, *grammar.arguments(tools)])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules: a turn that begins with a word and a brace on the next line is a call."""
    begins = r"[ \t\r\n]*[A-Za-z0-9_.-]+[ \t\r]*\n[ \t\r\n]*\{(?s:.*)"
    if _TURN in special_ids:  # a special token never occurs in plain text
        return f"(WORDS | (WORDS {delimiter(_TURN, special_ids)})? calls)", f"WORDS: /(?s:.*)/ & ~/{begins}/"
    return "(WORDS | calls)", f"WORDS: /(?s:.*)/ & ~/{begins}|(?s:.*){re.escape(_TURN)}(?s:.*)/"


def _own_turns(messages: Messages) -> Messages:
    """Return the messages with each call as a turn whose `metadata` is the name, and results as observations."""
    written: Messages = []
    for message in messages:
        if not message.get("tool_calls"):
            written.append({**message, "role": "observation"} if message["role"] == "tool" else message)
            continue
        if message["content"]:
            written.append({"role": "assistant", "content": message["content"]})
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            written.append({"role": "assistant", "metadata": name, "content": text})
    return written


def _write_into_messages(messages: Messages, tools: list[dict[str, object]] | None) -> Messages:
    """Return the messages with the tools as a member of the system message."""
    if not tools:
        return messages
    if messages[0]["role"] == "system":
        return [{**messages[0], "tools": tools}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


GLM4 = ToolFormat(
    name="glm4",
    models="GLM-4-0414",
    example='f\n{"a": "x"}',
    parser=Glm4ToolParser,
    delimiters=(_TURN,),
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
    own_turns=_own_turns,
)
GLM4_9B = replace(GLM4, name="glm4_9b", models="GLM-4-9B of 2024", write_into_messages=_write_into_messages)
