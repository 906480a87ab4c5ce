"""Calls of DeepSeek and Kimi K2: a name, a delimiter and JSON arguments, with delimiters per call and overall.

DeepSeek's published templates show earlier calls, but no tools. `DEEPSEEK_V3_TEXT` and `DEEPSEEK_V31_TEXT` are the
formats for these templates: the tools are written into the system message, where the models expect them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import Messages, ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallReader, CallScript, Steps, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema


@dataclass(frozen=True, slots=True)
class Syntax:
    """Delimiters of one format, and the plain text between them."""

    calls: str
    call: str
    before_name: str
    before_arguments: tuple[str, ...]  # text between name and arguments; "0" represents the call's number
    fence: str  # text after the arguments
    call_end: str
    calls_end: str
    between: str = ""


def _deepseek(words: str) -> str:
    """Return a special token of DeepSeek, with its wide bars and visible spaces."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK = tuple(
    map(_deepseek, ("tool calls begin", "tool call begin", "tool sep", "tool call end", "tool calls end"))
)
_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = _DEEPSEEK
V3 = Syntax(_CALLS, _CALL, f"function{_SEP}", ("\n```json\n",), "\n```", _CALL_END, _CALLS_END, "\n")
V31 = Syntax(_CALLS, _CALL, "", (_SEP,), "", _CALL_END, _CALLS_END)
_KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_FUNCTIONS = "functions."
KIMI = Syntax(_KIMI[0], _KIMI[1], _FUNCTIONS, (":", "0", _KIMI[2]), "", _KIMI[3], _KIMI[4])


class NamedCall(CallScript):
    """Reader of one call, from after the delimiter of all calls or its own delimiter."""

    def __init__(self, tools: Tools, syntax: Syntax, is_first: bool) -> None:
        self._syntax = syntax
        self._is_first = is_first
        super().__init__(tools)

    def _read(self) -> Steps:
        syntax = self._syntax
        if self._is_first:
            yield from self._space()
            yield from self._one_of(syntax.call)
        yield from self._space()
        if syntax.before_name:
            yield from self._one_of(syntax.before_name)
        name = yield from self._word()
        for text in syntax.before_arguments:
            yield from self._word() if text == "0" else self._one_of(text)
        yield from self._json_arguments(name)


class KimiCall(NamedCall):
    """Reader of one call of Kimi K2. The model sometimes omits parts of the id, or adds white space around it."""

    def _read(self) -> Steps:
        if self._is_first:
            yield from self._space()
            yield from self._one_of(KIMI.call)
        yield from self._space()
        name = yield from self._word()
        if self._back == ":":
            yield from self._one_of(":")
            yield from self._word()
        yield from self._space()
        yield from self._one_of(_KIMI[2])
        yield from self._json_arguments(name if name in self._tools else name.removeprefix(_FUNCTIONS))


class DeepSeekV3ToolParser(ToolParser):
    """Parser of DeepSeek V3 and R1: `function`, a delimiter, the name, and the arguments between fences."""

    SYNTAX = V3
    DELIMITERS = (_CALLS, _CALL, "```", _CALL_END, _CALLS_END)
    CLOSING = DELIMITERS[2:]

    def _reader(self, delimiter: str) -> CallReader:
        return NamedCall(self._tools, self.SYNTAX, delimiter == self.SYNTAX.calls)


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """Parser of DeepSeek V3.1: the name, a delimiter, the arguments."""

    SYNTAX = V31
    DELIMITERS = (_CALLS, _CALL, _CALL_END, _CALLS_END)
    CLOSING = DELIMITERS[2:]


class KimiToolParser(DeepSeekV3ToolParser):
    """Parser of Kimi K2: `functions.name:number`, and the arguments."""

    SYNTAX = KIMI
    DELIMITERS = (KIMI.calls, KIMI.call, KIMI.call_end, KIMI.calls_end)
    CLOSING = DELIMITERS[2:]

    def _reader(self, delimiter: str) -> CallReader:
        return KimiCall(self._tools, KIMI, delimiter == KIMI.calls)


def _forced_calls(syntax: Syntax, tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls between the delimiters of the format."""

    def pieces(*texts: str) -> str:
        return " ".join(grammar.delimited(text, delimiters, special_ids) for text in texts if text)

    delimiters = (*_DEEPSEEK, *_KIMI)
    between = f"{grammar.literal(syntax.between)} " if syntax.between else ""
    more = f" ({between}call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {pieces(syntax.calls)} tail", f"tail: call{more} {pieces(syntax.calls_end)}"]
    head = pieces(syntax.call, syntax.before_name)
    middle = " ".join("/[0-9]{1,2}/" if text == "0" else pieces(text) for text in syntax.before_arguments)
    tail = pieces(syntax.fence, syntax.call_end)
    for index, (name, _) in enumerate(tools):
        rules.append(f"call_{index}: {head} {grammar.literal(name)} {middle} args_{index} {tail}")
    return "\n".join([*rules, grammar.one_of_calls(tools), *grammar.arguments(tools)])


_INSTRUCTIONS = (
    "## Tools\nYou can call these functions:\n{tools}\nTo call one, end your answer with exactly this:\n{call}\n"
    "NAME is the name of a function above, and ARGUMENTS a JSON object that fits its parameters. {more}"
)


def _write_into_messages(syntax: Syntax, messages: Messages, tools: list[dict[str, Any]] | None) -> Messages:
    """Append the tools to the system message: each with a heading, its description and its parameters."""
    if not tools:
        return messages
    described = ""
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        described += f"\n### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        described += f"Parameters: {parameters}\n"
    one = f"{syntax.call}{syntax.before_name}NAME{''.join(syntax.before_arguments)}ARGUMENTS"
    call = f"{syntax.calls}{one}{syntax.fence}{syntax.call_end}{syntax.calls_end}"
    apart = "on a line of its own" if syntax.between else "without a space"
    more = f"Write further calls after the first {syntax.call_end}, each {apart}."
    text = _INSTRUCTIONS.format(tools=described, call=call, more=more)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]


def _kimi_id(name: str, number: int) -> str:
    return f"{_FUNCTIONS}{name}:{number}"


def _format(name: str, models: str, parser: type[DeepSeekV3ToolParser]) -> ToolFormat:
    syntax = parser.SYNTAX
    between = "".join(syntax.before_arguments)
    return ToolFormat(
        name=name,
        models=models,
        example=f"{syntax.calls}{syntax.call}{syntax.before_name}f{between}{{}}{syntax.fence}{syntax.call_end}{syntax.calls_end}",
        parser=parser,
        delimiters=_KIMI if syntax is KIMI else _DEEPSEEK,
        forced_calls=partial(_forced_calls, syntax),
        optional_calls=partial(grammar.text_then_calls, syntax.calls),
        text_arguments=syntax is not KIMI,
        call_id=_kimi_id if syntax is KIMI else None,
    )


DEEPSEEK_V3 = _format("deepseek_v3", "DeepSeek V3, R1 and its distillations", DeepSeekV3ToolParser)
DEEPSEEK_V31 = _format("deepseek_v31", "DeepSeek V3.1", DeepSeekV31ToolParser)
DEEPSEEK_V3_TEXT, DEEPSEEK_V31_TEXT = (
    replace(
        known,
        name=f"{known.name}_text",
        models=f"{known.models}, if the template leaves out the tools",
        needs=needs,
        write_into_messages=partial(_write_into_messages, syntax),
    )
    for known, syntax, needs in ((DEEPSEEK_V3, V3, V3.before_name), (DEEPSEEK_V31, V31, _SEP))
)
KIMI_K2 = _format("kimi_k2", "Kimi K2", KimiToolParser)
