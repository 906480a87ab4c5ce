"""Conversations in a short notation, with a word of its own in each turn, and the check that a prompt shows them all.

`s`, `d`, `u` and `a` are turns of the system, the developer, the user and the assistant. `A2` is a turn with two calls
and no text, `B2` one with a text, `R2` one with reasoning. `t0` is the result of the first call, `t9` of no call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
# fmt: off
PLAIN = [
    "u", "s u", "s u s", "s s u", "s d u", "d s u", "d u", "u d u", "u s u", "u s", "u u", "s u u", "s u s u", "a u",
    "s a u", "u a u", "s u a u", "s u a s u", "u a s u", "u a s a u", "s u a u s", "u a a u", "u a a", "s u a u u",
    "u a", "s", "a", "d", "s a",
]
CALLS = [
    "u A1 t0", "u A1 t0 u", "u A1 t0 a u", "u R1 t0", "u A2 t0 t1", "u A2 t0 t1 a u", "u A1 t0 A1 t1",
    "u A1 t0 A1 t1 a u", "s u A1 t0", "u B1 t0", "u B1 t0 a u", "u B2 t0 t1", "u B2 t0 t1 a u", "u B1 t0 B1 t1",
    "u B1 t0 B1 t1 a u", "u A1 u", "s u A1 t0 s u", "u A1 t0 s", "s u A2 t0 t1 u", "s u B2 t0 t1 s u",
    "u A1 t0 a u A1 t1 u", "u A1 t0 A1 t1 A1 t2 A1 t3 a u A1 t4 a u A1 t5",
]
# Results in another order than their calls, without a call, or not behind it; calls without a result.
ODD_RESULTS = [
    "u A2 t1 t0", "u A2 t1 t0 a u", "u A2 t0 u", "u A2 t1", "u t9 u", "u a t9 u", "u A2 u t0 t1", "u A1 t0 a u t9 u",
    "u A3 t2 t0 t1 a u A2 t3 t4 u", "u A1 t0 A1 t1 B1 t2 A2 t4 t3 a u a u",
]
# fmt: on


@dataclass
class Conversation:
    """Messages as a client sends them, and the words that a prompt must show."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)  # words whose order must be kept
    results: list[tuple[str, str, str]] = field(default_factory=list)  # (argument of the call, result, next anchor)


def conversation(shape: str) -> Conversation:
    """Return the conversation of a shape."""
    made = Conversation()
    num_calls = 0
    is_opening = True  # instructions at the beginning may be shown anywhere
    for number, kind in enumerate(shape.split()):
        text = f"word{number}end"
        is_opening = is_opening and kind in ("s", "d")
        message: dict[str, Any] = {"role": ROLES.get(kind, "assistant"), "content": text}
        if kind[0] in "ABR":
            calls = range(num_calls, num_calls + int(kind[1:]))
            num_calls = calls.stop
            message["tool_calls"] = [_call(i) for i in calls]
            made.words += [word for i in calls for word in (f"name{i}end", f"argument{i}end")]
            if kind[0] != "B":
                message["content"] = None
            if kind[0] == "R":
                message["reasoning_content"] = f"thought{number}end"
        elif kind[0] == "t":
            message |= {"role": "tool", "tool_call_id": f"call{kind[1:]}"}
            made.results.append((f"argument{kind[1:]}end", text, ""))
        elif not is_opening:
            made.results = [(argument, result, after or text) for argument, result, after in made.results]
            made.anchors.append(text)
        if message["content"]:
            made.words.append(text)
        made.messages.append(message)
    return made


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"name{number}end", "arguments": json.dumps({"x": f"argument{number}end"})}
    return {"id": f"call{number}", "type": "function", "function": function}


def fault(prompt: str, made: Conversation) -> str | None:
    """Return what is wrong with a prompt, or None."""
    lost = [word for word in made.words if word not in prompt]
    if lost:
        return f"lost: {lost}"
    places = [prompt.index(word) for word in made.anchors]
    if places != sorted(places):
        return "turns are in another order"
    for argument, result, after in made.results:
        place = prompt.index(result)
        if argument in made.words and argument in prompt and place < prompt.index(argument):
            return f"{result} comes before its call"
        if after and place > prompt.index(after):
            return f"{result} comes after the next turn"
    return None
