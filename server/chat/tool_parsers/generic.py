"""Tools for a template that knows nothing of them: the messages themselves say what there is and what was called.

The system message gets the list, earlier calls become text, results become the user's words; where a template has no
system role, the first turn of the user gets it all. Knows messages as plain dictionaries; the form of calls is the
Hermes one.
"""

from __future__ import annotations

import json
from typing import Any

_HEAD = (
    "You can call these functions; each line describes one as JSON:\n{tools}\n"
    "To call one, answer with <tool_call>\n"
    '{{"name": "the function", "arguments": {{"its": "arguments"}}}}\n</tool_call> and nothing else.'
)


def tell(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, takes_system: bool, takes_runs: bool
) -> list[dict[str, Any]]:
    """The same conversation in messages with text alone; as it was given when it has nothing to do with tools.

    What the template takes decides their form: whether it has a role `system`, and whether turns of one role may follow
    each other.
    """
    told = [_plain(message) for message in messages]
    if tools:
        words = _HEAD.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
        if told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{words}"}
        else:
            told.insert(0, {"role": "system", "content": words})
    if told == messages or (takes_system and takes_runs):
        return told
    if not takes_system or [message["role"] for message in told[:2]] == ["system", "assistant"]:
        told = [{**message, "role": "user"} if message["role"] == "system" else message for message in told]
    return _merged(told)


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One turn in place of several of the same role."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            texts = [text for text in (merged[-1]["content"], message["content"]) if text]
            merged[-1] = {**merged[-1], **message, "content": "\n\n".join(texts)}
        else:
            merged.append(message)
    return merged


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    for call in calls:
        body = json.dumps(call["function"], ensure_ascii=False)
        lines.append(f"<tool_call>\n{body}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(lines)}
