"""What a chat answer is bound to: forced calls, the caller's own constraint, or either; thoughts may come before.

Knows constraints and tool plans; the text of grammars is written in `tools.grammar`.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import RequestError
from engine.sampling_params import Grammar
from server.chat.prompt import ChatPrompt
from server.chat.tool_parsers import grammar


def answer_grammar(own: Grammar | None, prompt: ChatPrompt, marks: grammar.Marks) -> Grammar | None:
    """`own` is the caller's constraint; `marks` are special ids by name. Raises `RequestError`."""
    tools = prompt.tools
    if tools is not None and tools.must_call:
        if own is not None and own.kind not in ("json_schema", "json_object"):  # those bind only the content
            message = f"'{own.param}' cannot be combined with a tool_choice that makes the model call a function."
            raise RequestError(message, own.param)
        return _whole("calls", tools.rules(marks), prompt, "tools")
    if own is None and tools is not None and tools.is_strict:
        body, rules = grammar.free(tools.form, marks)
        return _whole(body, f"{rules}\n{tools.rules(marks)}", prompt, "tools")
    if own is None or not (tools or prompt.may_think or prompt.is_thinking):
        return own
    rules = _rule("answer", own)
    if tools is None or tools.form.reader is None:
        return _whole("answer", rules, prompt, own.param)
    return _whole("(answer | calls)", f"{rules}\n{tools.rules(marks)}", prompt, own.param)


def _whole(body: str, rules: str, prompt: ChatPrompt, param: str) -> Grammar:
    text = grammar.whole(body, rules, may_think=prompt.may_think, is_thinking=prompt.is_thinking)
    return Grammar("lark", text, param)


def _rule(name: str, own: Grammar) -> str:
    """The caller's constraint as a rule."""
    if own.kind == "json_schema":
        schema: Any = json.loads(own.text)
        return grammar.schema_rule(name, schema if isinstance(schema, dict) else {})
    if own.kind == "json_object":
        return grammar.schema_rule(name, {"type": "object"})
    if own.kind == "choice":
        return f"{name}: " + " | ".join(map(grammar.json_text, json.loads(own.text)))
    if own.kind == "regex":
        return f"{name}: /{_escaped(own.text)}/"
    message = "A grammar of the caller's own cannot be combined with tools, nor with a model that thinks first."
    raise RequestError(message, own.param)


def _escaped(pattern: str) -> str:
    """The expression between slashes: a bare slash or line end inside would end it; `::=` would look like GBNF."""
    result: list[str] = []
    after_backslash = False
    for position, character in enumerate(pattern):
        written = character
        if character == "\n":
            written = "\\n"
        elif character == "/" and not after_backslash:
            written = "\\/"
        elif character == ":" and pattern[position - 1 : position + 2] == "::=":
            written = "\\x3a"
        result.append(written)
        after_backslash = character == "\\" and not after_backslash
    return "".join(result)
