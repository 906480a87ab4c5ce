"""Instruct models with the formats that their authors publish: the description of a model, and writers of calls.

Each template has the constructs of the published one that matter here, in our words: turns, the place of tools and
calls, and the variables that switch reasoning. Long instructions are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Model:
    """A model's template, and the text that it writes."""

    template: str
    tool_format: str
    write: Callable[[Calls], str]  # calls as the model writes them in a response
    history: str  # the call `weather` in Bern and its result "rain", as the template writes them
    reasoning: str | None = None  # name of the reasoning format
    think: tuple[str, str] = ("", "")  # tags that the model writes around its reasoning; the first may be in the prompt
    answer: tuple[str, str] = ("", "")  # tags that the model writes around its response
    switches: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # variable -> (value for on, value for off)
    prompts: tuple[str, str] = ("", "")  # a part of the prompt with reasoning on, and with reasoning off


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_object(call: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {as_json(call[1])}}}'


def call_list(calls: Calls) -> str:
    return "[" + ", ".join(map(call_object, calls)) + "]"


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call_object(call)}\n</tool_call>" for call in calls)


def python_calls(calls: Calls, between: str) -> str:
    return between.join(f"{name}({', '.join(f'{k}={as_json(v)}' for k, v in given.items())})" for name, given in calls)


def with_parameters(calls: Calls, start: str, call: str, parameter: str, end: str, outer_end: str) -> str:
    written = []
    for name, given in calls:
        pairs = [
            parameter.format(key, value if isinstance(value, str) else as_json(value)) for key, value in given.items()
        ]
        written.append(call.format(name) + "".join(pairs) + end)
    return start + "".join(written) + outer_end


BERN = {"city": "Bern"}
