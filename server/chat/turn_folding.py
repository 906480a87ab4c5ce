"""Rewritings of a conversation for a template that would leave out or refuse some of its turns.

A `Folding` says which rewritings are applied. Which ones a template needs is found out by trial: `turn_trial.py`.
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
    """How system and developer turns are rewritten; each step changes more than the one before."""

    KEPT = 0
    JOINED = 1  # those at the beginning become one turn
    FIRST = 2  # ... and the text of later ones goes to the user's turns
    USER = 3  # the text of all of them goes to the user's turns


class CallTurns(IntEnum):
    """How tool calls and their results are rewritten."""

    KEPT = 0
    ORDERED = 1  # results follow in the order of their calls
    SINGLE = 2  # one call in a turn, followed by its result
    LAST_TEXT = 3  # calls become text of the assistant where the user's next turn comes without an answer
    TEXT = 4  # all calls become text of the assistant
    ALL_TEXT = 5  # ... and results become text of the user


class CallText(IntEnum):
    """How the text of the assistant beside a call is moved."""

    KEPT = 0
    APART_IF_ANSWERED = 1  # a turn of its own, if an answer without calls follows later
    APART = 2  # a turn of its own
    TOGETHER = (
        3  # one turn in each round: the answer behind the results or, if there is none yet, before the first call
    )


class Runs(IntEnum):
    """How turns are rewritten for a template that wants the user and the assistant to take turns."""

    KEPT = 0
    JOINED = 1  # neighbouring turns of the user, or of the assistant, become one
    FILLED = 2  # ... and an empty turn comes between a result and the user, and before an answer at the beginning


@dataclass(frozen=True, slots=True)
class Folding:
    """The rewritings of a conversation. Without arguments, none."""

    calls: CallTurns = CallTurns.KEPT
    call_text: CallText = CallText.KEPT
    system: SystemTurns = SystemTurns.KEPT
    runs: Runs = Runs.KEPT
    developer_is_system: bool = False
    stray_is_text: bool = False  # results that do not stand behind their calls become text of the user
    other_arguments: bool = False  # arguments are text if the format of calls has objects, and the other way round

    def fold_calls(self, messages: Messages, write_calls: WriteCalls | None) -> Messages:
        """Return the messages with their calls and results rewritten.

        `write_calls` writes a text and the calls behind it as the model does; without it, calls cannot become text.
        """
        if self.stray_is_text:
            messages = _stray_as_text(messages)
        if self.calls:
            messages = _order_results(messages, is_single=self.calls is CallTurns.SINGLE)
        if self.calls >= CallTurns.LAST_TEXT:
            assert write_calls is not None
            chosen = _unanswered_calls(messages) if self.calls is CallTurns.LAST_TEXT else range(len(messages))
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
        return _fill_turns(messages) if self.runs is Runs.FILLED else messages

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the rewritings, for the log."""
        chosen = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(name if value is True else f"{name}:{value.name.lower()}" for name, value in chosen if value)


def joined(*texts: str) -> str:
    """Join texts that are not empty."""
    return _GAP.join(text for text in texts if text)


def _fold_system(messages: Messages, how: SystemTurns) -> Messages:
    """Fold the instructions: system and developer turns."""
    opening = next((i for i, m in enumerate(messages) if m["role"] not in INSTRUCTIONS), len(messages))
    first, rest = messages[:opening], messages[opening:]
    if how is SystemTurns.USER:
        first, rest = [], messages
    elif first:
        first = [{**first[0], "content": joined(*(m["content"] for m in first))}]
    return [*first, *rest] if how is SystemTurns.JOINED else [*first, *_into_user_turns(rest)]


def _into_user_turns(messages: Messages) -> Messages:
    """Move instructions to the user's turn behind them, else to the one before them, else to a turn of their own."""
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
    """Let the results behind calls follow in the order of the calls, each behind its own call if `is_single`."""
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
    """Return a turn with one of the calls; the first has the turn's text and reasoning too."""
    calls = [message["tool_calls"][number]]
    return (
        {**message, "tool_calls": calls} if number == 0 else {"role": "assistant", "content": "", "tool_calls": calls}
    )


def _unanswered_calls(messages: Messages) -> set[int]:
    """Return the last turn with calls in each round that goes on with the user, not with an answer."""
    found: set[int] = set()
    last: int | None = None  # the newest turn with calls, while no answer has come
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
    """Return the turn of a tool as one of the user."""
    return {"role": "user", "content": result_as_text(message["content"])} if message["role"] == "tool" else message


def _stray_as_text(messages: Messages) -> Messages:
    """Write results that do not stand behind their calls as text of the user."""
    written: Messages = []
    ids: set[str] = set()
    for message in messages:
        if message["role"] != "tool":
            ids = {call["id"] for call in message.get("tool_calls") or ()}
        written.append(message if message.get("tool_call_id") in ids else _result_as_text(message))
    return written


def _split_call_texts(messages: Messages, how: CallText) -> Messages:
    """Let the text of turns with calls be a turn of its own."""
    end = len(messages)
    if how is CallText.APART_IF_ANSWERED:
        answers = (i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls"))
        end = max(answers, default=0)
    written: Messages = []
    for position, message in enumerate(messages):
        if message.get("tool_calls") and message["content"] and position < end:
            written += [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]
        else:
            written.append(message)
    return written


def _collect_call_texts(messages: Messages) -> Messages:
    """Let each round, from one turn of the user to the next, have the texts of its turns with calls in one turn."""
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
    answers = (i for i in range(callers[-1] + 1, len(messages)) if messages[i]["role"] == "assistant")
    answer = next(answers, None)
    if answer is None:
        written.insert(callers[0], {"role": "assistant", "content": joined(*texts)})
    else:
        written[answer] = {**written[answer], "content": joined(*texts, written[answer]["content"])}
    return written


def _join_turns(messages: Messages) -> Messages:
    """Join neighbouring turns of the user, and neighbouring turns of the assistant that have no calls."""
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
    """Put an empty answer between a call or its result and the user's turn, and an empty turn of the user first."""
    written: Messages = []
    for message in messages:
        last = written[-1] if written else {}
        if message["role"] == "user" and (last.get("role") == "tool" or last.get("tool_calls")):
            written.append({"role": "assistant", "content": ""})
        elif message["role"] == "assistant" and last.get("role", "system") in INSTRUCTIONS:
            written.append({"role": "user", "content": ""})
        written.append(message)
    return written
