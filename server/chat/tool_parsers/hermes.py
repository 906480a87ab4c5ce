"""The Hermes format, of Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Also the format of templates that know nothing of tools (`GENERIC`): the tools, earlier calls and their results are
written into the text of the messages. And of templates in a form unknown here (`UNKNOWN`), which can only be forced.
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
    """Any number of calls, with content before, between and behind them."""

    DELIMITERS = (START, END)
    CLOSING = (END,)

    def _reader(self, delimiter: str) -> CallReader:
        return CallParser(self._tools)


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Rules for forced calls: each delimiter stands on its own line."""
    start, end = grammar.delimiter(START, special_ids), grammar.delimiter(END, special_ids)
    more = f' ("\\n" {start} body){{0,{most - 1}}}' if most > 1 else ""
    rules = [f"calls: {start} tail", f"tail: body{more}", f'body: "\\n" call "\\n" {end}']
    return "\n".join([*rules, *grammar.call_objects(tools, "arguments")])


def _matches(template: str) -> bool:
    """Whether a template is for Hermes: some models write XML between the same delimiters."""
    return START in template and "<function=" not in template and "<arg_key>" not in template


def write_into_messages(
    messages: Messages, tools: list[dict[str, Any]] | None, takes_system: bool, takes_runs: bool
) -> Messages:
    """Writes the tools, calls and results of a conversation as text; without any it stays as it was given.

    The system message gets the list of tools, calls become text, results become the user's words. `takes_system`: the
    template has a role `system`; else the user's first turn gets the list. `takes_runs`: turns of one role may follow
    each other.
    """
    written = [_plain(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=lines)
        if written[0]["role"] == "system":
            written[0] = {**written[0], "content": f"{written[0]['content']}\n\n{instructions}"}
        else:
            written.insert(0, {"role": "system", "content": instructions})
    if written == messages or (takes_system and takes_runs):
        return written
    if not takes_system or [message["role"] for message in written[:2]] == ["system", "assistant"]:
        written = [{**message, "role": "user"} if message["role"] == "system" else message for message in written]
    return _merged(written)


def _merged(messages: Messages) -> Messages:
    """Joins consecutive turns of the same role into one."""
    merged: Messages = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            texts = [text for text in (merged[-1]["content"], message["content"]) if text]
            merged[-1] = {**merged[-1], **message, "content": "\n\n".join(texts)}
        else:
            merged.append(message)
    return merged


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message without calls: they, and results, become text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    for call in calls:
        body = json.dumps(call["function"], ensure_ascii=False)
        lines.append(f"{START}\n{body}\n{END}")
    return {"role": message["role"], "content": "\n".join(lines)}


HERMES = ToolFormat(
    name="hermes",
    models="Qwen 2.5 and 3, Hermes, Granite 4 and others",
    example='<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    parser=HermesToolParser,
    delimiters=(START, END),
    matches=_matches,
    forced_calls=_forced_calls,
    optional_calls=partial(grammar.text_then_calls, START),
)
GENERIC = replace(
    HERMES,
    name="generic",
    models="templates that know nothing of tools: the prompt gets them as text",
    matches=lambda template: "tools" not in template,
    write_into_messages=write_into_messages,
)
UNKNOWN = replace(
    HERMES, name="unknown", models="all others", delimiters=(), matches=lambda template: True, is_parsed=False
)
