"""Tools for a template that knows nothing of them: the messages themselves say what there is and what was called.

The system message gets the list, earlier calls become text, results become the user's words. Knows messages as plain
dictionaries; the form of calls is the Hermes one.
"""

from __future__ import annotations

import json
from typing import Any

_HEAD = (
    "You can call these functions; each line describes one as JSON:\n{tools}\n"
    "To call one, answer with <tool_call>\n"
    '{{"name": "the function", "arguments": {{"its": "arguments"}}}}\n</tool_call> and nothing else.'
)


def tell(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant messages with text alone."""
    told = [_plain(message) for message in messages]
    if not tools:
        return told
    words = _HEAD.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


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
