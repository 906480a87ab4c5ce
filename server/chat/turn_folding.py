"""Rewrites of a conversation for a template that would omit or refuse some of its turns.

A `Folding` selects the rewrites to apply. The rewrites that a template needs are found by trial: `turn_trial.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from oarlock.server.chat.tool_parsers.base import Messages
from oarlock.server.chat.tool_parsers.hermes import result_as_text

INSTRUCTIONS = ("system", "developer")
_GAP = "\n\n"  # between joined texts

Message = dict[str, Any]
WriteCalls = Callable[[str, list[Message]], str]


class SystemTurns(IntEnum):
    """Rewrites of system and developer turns; each changes more than the previous."""

    KEPT = 0
    JOINED = 1  # initial instructions become one turn
    FIRST = 2  # ... and the text of later instructions moves into user turns
    USER = 3  # the text of all instructions moves into user turns


class CallTurns(IntEnum):
    """Rewrites of tool calls and their results."""

    KEPT = 0
    ORDERED = 1  # results follow in the order of their calls
    SINGLE = 2  # one call per turn, followed by its result
    LAST_TEXT = 3  # calls become assistant text if the next user turn comes without a response
    TEXT = 4  # all calls become assistant text
    ALL_TEXT = 5  # ... and results become user text


class CallText(IntEnum):
    """Rewrites of assistant text in turns with calls."""

    KEPT = 0
    APART_IF_ANSWERED = 1  # a separate turn, if a response without calls follows later
    APART = 2  # a separate turn
    TOGETHER = 3  # one turn per round: the response after the results or, if there is none yet, before the first call


class TurnRuns(IntEnum):
    """Rewrites of turns for a template that requires the user and the assistant to alternate."""

    KEPT = 0
    JOINED = 1  # adjacent turns of the user, or of the assistant, become one
    FILLED = 2  # ... with an empty turn between a result and the user, and before an initial assistant turn


@dataclass(frozen=True, slots=True)
class Folding:
    """Selected rewrites of a conversation; by default none."""

    calls: CallTurns = CallTurns.KEPT
    call_text: CallText = CallText.KEPT
    system: SystemTurns = SystemTurns.KEPT
    runs: TurnRuns = TurnRuns.KEPT
    developer_is_system: bool = False
    stray_is_text: bool = False  # results that do not follow their calls become user text
    other_arguments: bool = False  # pass arguments as text if the format of calls has objects, and vice versa

    def fold_calls(self, messages: Messages, write_calls: WriteCalls | None) -> Messages:
        """Return the messages with their calls and results rewritten.

        `write_calls` returns a text and the calls after it in the model's notation; without it, calls cannot become
        text.
        """
        if self.stray_is_text:
            messages = _stray_as_text(messages)
        if self.calls:
            messages = _order_results(messages, is_single=self.calls is CallTurns.SINGLE)
        if self.calls >= CallTurns.LAST_TEXT:
            assert write_calls is not None
            chosen = _open_calls(messages) if self.calls is CallTurns.LAST_TEXT else range(len(messages))
            messages = [_without_calls(m, write_calls) if i in chosen else m for i, m in enumerate(messages)]
        if self.calls >= CallTurns.ALL_TEXT:
            messages = [_result_as_text(m) for m in messages]
        if self.call_text is CallText.TOGETHER:
            return _collect_call_texts(messages)
        return _split_call_texts(messages, self.call_text) if self.call_text else messages

    def fold_turns(self, messages: Messages) -> Messages:
        """Return the messages with system turns and runs of turns rewritten."""
        if self.developer_is_system:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if self.system:
            messages = _fold_system(messages, self.system)
        if self.runs:
            messages = _join_turns(messages)
        return _fill_turns(messages) if self.runs is TurnRuns.FILLED else messages

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the selected rewrites, for the log."""
        chosen = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(name if value is True else f"{name}:{value.name.lower()}" for name, value in chosen if value)


def joined(*texts: str) -> str:
    """Join the texts that are not empty."""
    return _GAP.join(text for text in texts if text)


def _fold_system(messages: Messages, how: SystemTurns) -> Messages:
    """Rewrite the instructions: system and developer turns."""
    opening = next((i for i, m in enumerate(messages) if m["role"] not in INSTRUCTIONS), len(messages))
    first, rest = messages[:opening], messages[opening:]
    if how is SystemTurns.USER:
        first, rest = [], messages
    elif first:
        first = [{**first[0], "content": joined(*(m["content"] for m in first))}]
    return [*first, *rest] if how is SystemTurns.JOINED else [*first, *_into_user_turns(rest)]


def _into_user_turns(messages: Messages) -> Messages:
    """Move instructions into the next user turn, else into the previous user turn, else into a new user turn."""
    written: Messages = []
    waiting: list[str] = []
    for message in [*messages, None]:
        if message is not None and message["role"] in INSTRUCTIONS:
            waiting.append(message["content"])
            continue
        if waiting:
            text, waiting = joined(*waiting), []
            if message is not None and message["role"] == "user":
                message = {**message, "content": joined(text, message["content"])}
            elif written and written[-1]["role"] == "user":
                written[-1] = {**written[-1], "content": joined(written[-1]["content"], text)}
            else:
                written.append({"role": "user", "content": text})
        if message is not None:
            written.append(message)
    return written


def _order_results(messages: Messages, *, is_single: bool) -> Messages:
    """Put the results of calls into the order of the calls, each directly after its own call if `is_single`."""
    written: Messages = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if not message.get("tool_calls"):
            written.append(message)
            continue
        results = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        calls = message["tool_calls"]
        turns = [_one_call(message, i) for i in range(len(calls))] if is_single else [message]
        for number, call in enumerate(calls):
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            results = [result for result in results if result not in own]
            if is_single:
                written += [turns[number], *own]
            else:
                turns += own
        written += results if is_single else [*turns, *results]
    return written


def _one_call(message: Message, number: int) -> Message:
    """Return a turn with a single call; the turn of the first call keeps the text and reasoning."""
    calls = [message["tool_calls"][number]]
    return (
        {**message, "tool_calls": calls} if number == 0 else {"role": "assistant", "content": "", "tool_calls": calls}
    )


def _open_calls(messages: Messages) -> set[int]:
    """Return the last turn with calls in each round that continues with the user instead of a response."""
    found: set[int] = set()
    last: int | None = None  # last turn with calls that has no response so far
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            last = position if message.get("tool_calls") else None
        elif message["role"] == "user" and last is not None:
            found.add(last)
            last = None
    return found


def _without_calls(message: Message, write_calls: WriteCalls) -> Message:
    """Return the turn with its calls as text."""
    if not message.get("tool_calls"):
        return message
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": write_calls(message["content"], message["tool_calls"])}


def _result_as_text(message: Message) -> Message:
    """Return a tool turn as a user turn."""
    return {"role": "user", "content": result_as_text(message["content"])} if message["role"] == "tool" else message


def _stray_as_text(messages: Messages) -> Messages:
    """Write results that do not follow their calls as user text."""
    written: Messages = []
    ids: set[str] = set()
    for message in messages:
        if message["role"] != "tool":
            ids = {call["id"] for call in message.get("tool_calls") or ()}
        written.append(message if message.get("tool_call_id") in ids else _result_as_text(message))
    return written


def _split_call_texts(messages: Messages, how: CallText) -> Messages:
    """Move the text of turns with calls into a turn of its own."""
    end = len(messages)
    if how is CallText.APART_IF_ANSWERED:
        replies = (i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls"))
        end = max(replies, default=0)
    written: Messages = []
    for position, message in enumerate(messages):
        if message.get("tool_calls") and message["content"] and position < end:
            written += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            written.append(message)
    return written


def _collect_call_texts(messages: Messages) -> Messages:
    """Collect the texts of a round's turns with calls in one turn; a round lasts from one user turn to the next."""
    written: Messages = []
    round_: Messages = []
    for message in [*messages, {"role": "user"}]:
        if message["role"] != "user":
            round_.append(message)
            continue
        written += [*_with_one_call_text(round_), message]
        round_ = []
    return written[:-1]


def _with_one_call_text(messages: Messages) -> Messages:
    callers = [i for i, m in enumerate(messages) if m.get("tool_calls")]
    texts = [messages[i]["content"] for i in callers if messages[i]["content"]]
    if not texts:
        return messages
    written = [{**m, "content": ""} if m.get("tool_calls") else m for m in messages]
    replies = (i for i in range(callers[-1] + 1, len(messages)) if messages[i]["role"] == "assistant")
    reply = next(replies, None)
    if reply is None:
        written.insert(callers[0], {"role": "assistant", "content": joined(*texts)})
    else:
        written[reply] = {**written[reply], "content": joined(*texts, written[reply]["content"])}
    return written


def _join_turns(messages: Messages) -> Messages:
    """Join adjacent user turns, and adjacent assistant turns without calls."""
    written: Messages = []
    for message in messages:
        last = written[-1] if written else {}
        has_calls = last.get("tool_calls") or message.get("tool_calls")
        if last.get("role") == message["role"] in ("user", "assistant") and not has_calls:
            written[-1] = {**last, **message, "content": joined(last["content"], message["content"])}
        else:
            written.append(message)
    return written


def _fill_turns(messages: Messages) -> Messages:
    """Insert an empty response between a call or result and a user turn, and a user turn before an initial response."""
    written: Messages = []
    for message in messages:
        last = written[-1] if written else {}
        if message["role"] == "user" and (last.get("role") == "tool" or last.get("tool_calls")):
            written.append({"role": "assistant", "content": ""})
        elif message["role"] == "assistant" and last.get("role", "system") in INSTRUCTIONS:
            written.append({"role": "user", "content": ""})
        written.append(message)
    return written
