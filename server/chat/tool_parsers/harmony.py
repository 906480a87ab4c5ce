"""Harmony, the format of gpt-oss: the output is a sequence of messages with a channel and an optional recipient.

`analysis` holds the reasoning, `final` the response, and `commentary` with a recipient `functions.name` a call. The
tokens are from OpenAI's published description of the format.
"""

import re
from collections.abc import Sequence

from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import (
    CallParser,
    CallReader,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolCallStart,
    Tools,
)
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TURN = f"{START}assistant"  # end of a prompt
FINAL = f"{CHANNEL}final{MESSAGE}"  # precedes the text for the user
_HEAD_BEGINS = (START, CHANNEL, "to=", CONSTRAIN, MESSAGE, "assistant")
_MAX_HEAD = 512  # limit in characters
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyParser(ToolParser):
    """Parser of the messages of one output. Heads and delimiters are dropped; text without a head is content."""

    DELIMITERS = (START, CHANNEL, END, CALL, RETURN)

    def __init__(self, tools: Tools, parallel: bool = True) -> None:
        super().__init__(tools, parallel)
        self.reasoning_type: type[ReasoningDelta | ContentDelta] = ReasoningDelta  # event type of reasoning
        self.in_items = False  # the caller keeps messages separate; otherwise a line end separates messages of one type
        self._head = ""
        self._in_message = False
        self._seen_types: set[type[MessageEvent]] = set()  # event types emitted so far
        self._last_type: type[MessageEvent] | None = None  # type of the most recent message
        self._begin_head("")  # the prompt ends with `TURN`

    def flush(self, is_ended: bool = False) -> list[MessageEvent]:
        if not self._searching and self._call is None:
            self._attempt = []  # an incomplete head
        return super().flush(is_ended)

    def _reader(self, delimiter: str) -> CallReader:
        raise NotImplementedError(f"{delimiter} begins a head, which names the function")

    def _begin_head(self, delimiter: str) -> None:
        self._searching, self._call = False, None
        self._head = delimiter if delimiter != START else ""
        self._attempt = [delimiter]

    def _on_delimiter(self, delimiter: str, events: list[MessageEvent]) -> None:
        if delimiter in (START, CHANNEL):
            self._begin_head(delimiter)
        elif not self._in_message:
            events.append(ContentDelta(delimiter))
        self._in_message = False

    def _on_character(self, character: str, events: list[MessageEvent]) -> bool:
        if self._call is not None:
            return self._follow_call(self._call, character, events)
        head = self._head + character
        begun = head.lstrip()
        if len(head) > _MAX_HEAD or not any(begun.startswith(text) or text.startswith(begun) for text in _HEAD_BEGINS):
            return self._abandon_call(events)
        self._head = head
        self._attempt.append(character)
        if character == ">" and head.endswith(MESSAGE):
            self._begin_message(head, events)
        return True

    def _begin_message(self, head: str, events: list[MessageEvent]) -> None:
        self._attempt = []
        self._in_message = self._searching = True
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1] in self._tools:
            self._last_type = ToolCallStart
            self._begin_call("", CallParser(self._tools, recipient[1]))
            return
        self._sink = self.reasoning_type if f"{CHANNEL}analysis" in head else ContentDelta
        if self._sink is self._last_type or (self._sink in self._seen_types and not self.in_items):
            events.append(self._sink("\n"))
        self._seen_types.add(self._sink)
        self._last_type = self._sink


def _message(rule: str, channels: str, special_ids: SpecialIds) -> str:
    """Return rules for `rule`: a message of any text on any of these channels, and the start of the next message."""
    mark = {text: delimiter(text, special_ids) for text in (START, CHANNEL, MESSAGE, END)}
    head = f"{mark[CHANNEL]} ({channels}) {mark[MESSAGE]}"
    rules = f"{rule}: {head} {rule}_text {mark[START]} {literal('assistant')}\n"
    if END in special_ids:  # a special token never occurs in plain text
        return f"{rules}{rule}_text: {rule.upper()} {mark[END]}\n{rule.upper()}: /(?s:.*)/"
    return f"{rules}{rule}_text[suffix={literal(END)}]: /(?s:.*)/"


def after_reasoning(body: str, special_ids: SpecialIds) -> tuple[str, str]:
    """Return (`body` with an optional reasoning message before it, the rules that this needs)."""
    return f"reasoning? {body}", _message("reasoning", literal("analysis"), special_ids)


def final_head(special_ids: SpecialIds) -> str:
    """Return the grammar of the head before the text of a response."""
    return f"{delimiter(CHANNEL, special_ids)} {literal('final')} {delimiter(MESSAGE, special_ids)}"


def _forced_calls(tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for one forced call, which ends the model's turn."""
    channel, message = delimiter(CHANNEL, special_ids), delimiter(MESSAGE, special_ids)
    kind = f"{literal(' ')} {delimiter(CONSTRAIN, special_ids)} {literal('json')}"
    rules = [f"calls: {channel} tail", f"tail: {literal('commentary to=functions.')} call", grammar.one_of_calls(tools)]
    for index, (name, _) in enumerate(tools):
        rules.append(f"call_{index}: {literal(name)} {kind} {message} args_{index}")
    return "\n".join([*rules, *grammar.arguments(tools)])


def _optional_calls(special_ids: SpecialIds) -> tuple[str, str]:
    """Return rules for any messages, followed by a response or a call."""
    if CHANNEL not in special_ids:  # tokenizer of another model: one text, optionally followed by a call
        return grammar.text_then_calls(CHANNEL, special_ids)
    rules = _message("message", f"{literal('analysis')} | {literal('commentary')}", special_ids)
    return f"message* (calls | {final_head(special_ids)} FINAL)", f"{rules}\nFINAL: /(?s:.*)/"


HARMONY = ToolFormat(
    name="openai",
    models="gpt-oss",
    example=f'{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{{"a": "x"}}{CALL}',
    parser=HarmonyParser,
    delimiters=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    forced_calls=_forced_calls,
    optional_calls=_optional_calls,
)
