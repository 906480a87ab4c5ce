"""Grammars that force calls: literal text of the model's own format around arguments bound to their schema.

Writes grammars in the Lark dialect of the engine's compiler. Knows how each format looks when it is written; what reads
it is `readers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server.chat.tool_parsers.registry import ToolFormat

MAX_CALLS = 16  # a model that is made to call must also come to an end
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_THOUGHTS = 'thoughts[suffix="</think>"]: /(?s:.*)/\nlines: /\\n{0,2}/'

# The special ids of marks by name; a mark that is no special token is plain text.
Marks = Mapping[str, int]


def forced(form: ToolFormat, tools: Sequence[tuple[str, dict[str, Any]]], parallel: bool, marks: Marks) -> str:
    """Rules for `calls`: one call of one of the tools (name, schema), or several where the format has a way.

    `tail` is the same without the mark that begins it.
    """
    most = MAX_CALLS if parallel else 1
    return _WRITERS.get(form.name, _hermes)(tools, most, marks)


def free(form: ToolFormat, marks: Marks) -> tuple[str, str]:
    """(body, rules): any text, and then perhaps `calls`; what begins like a call becomes one."""
    if form.name == "llama3":  # nothing but a call begins with a brace
        tag = "<|python_tag|>"
        before = f"<[{marks[tag]}]>? " if tag in marks else ""
        return "(words | tagged)", f"tagged: {before}calls\nwords: /([^{{](?s:.*))?/"
    opening = form.marks[0]
    if opening in marks:  # a special token is never part of a text
        return "words calls?", "words: /(?s:.*)/"
    inside = re.escape(opening)
    return "(WORDS | before tail)", (
        f"WORDS: /(?s:.*)/ & ~/(?s:.*{inside}.*)/\nbefore[suffix={_literal(opening)}]: /(?s:.*)/"
    )


def whole(body: str, rules: str, *, may_think: bool, is_thinking: bool) -> str:
    """The grammar of an answer that is `body`; before it a model that thinks may finish its thoughts."""
    if is_thinking:
        return f"start: thoughts lines {body}\n{_THOUGHTS}\n{rules}"
    if may_think:
        return f'start: ("<think>" thoughts lines)? {body}\n{_THOUGHTS}\n{rules}'
    return f"start: {body}\n{rules}"


def schema_rule(name: str, schema: dict[str, Any]) -> str:
    """A rule that is one JSON value of this schema, without needless white space."""
    guided = {**schema, "x-guidance": {**_mapping(schema.get("x-guidance")), **_COMPACT}}
    return f"{name}: %json {json_text(guided)}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _arguments(tools: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """One rule for each tool's arguments, which are an object even where the schema does not say so."""
    return [schema_rule(f"args_{i}", {"type": "object", **schema}) for i, (_, schema) in enumerate(tools)]


def json_text(value: Any) -> str:
    """JSON without `::=`, by which the compiler tells another notation from this one."""
    return json.dumps(value, ensure_ascii=False).replace("::=", "\\u003a:=")


def _literal(text: str) -> str:
    return json_text(text)


def _mark(name: str, marks: Marks) -> str:
    return f"<[{marks[name]}]>" if name in marks else _literal(name)


def _objects(tools: Sequence[tuple[str, dict[str, Any]]], key: str, before: str = "", behind: str = "") -> list[str]:
    """`call`: an object with the name and, under `key`, the arguments."""
    rules = []
    for index, (name, _) in enumerate(tools):
        head = _literal(f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        rules.append(f"call_{index}: {head} args_{index} {_literal('}' + behind)}")
    return [_one_of("call", "call_", len(tools)), *rules, *_arguments(tools)]


def _one_of(rule: str, prefix: str, count: int) -> str:
    return f"{rule}: " + " | ".join(f"{prefix}{index}" for index in range(count))


def _hermes(tools: Sequence[tuple[str, dict[str, Any]]], most: int, marks: Marks) -> str:
    """`<tool_call>` and `</tool_call>` on lines of their own."""
    opening, closing = _mark("<tool_call>", marks), _mark("</tool_call>", marks)
    more = f' ("\\n" {opening} body){{0,{most - 1}}}' if most > 1 else ""
    rules = [f"calls: {opening} tail", f"tail: body{more}", f'body: "\\n" call "\\n" {closing}']
    return "\n".join([*rules, *_objects(tools, "arguments")])


def _llama(tools: Sequence[tuple[str, dict[str, Any]]], most: int, marks: Marks) -> str:
    """One bare object: the model was not trained to write several."""
    return "\n".join(["calls: call", *_objects(tools, "parameters")])


def _mistral(tools: Sequence[tuple[str, dict[str, Any]]], most: int, marks: Marks) -> str:
    """A list behind the mark."""
    more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
    rules = [f"calls: {_mark('[TOOL_CALLS]', marks)} tail", f'tail: "[" call{more} "]"']
    return "\n".join([*rules, *_objects(tools, "arguments")])


def _mistral_named(tools: Sequence[tuple[str, dict[str, Any]]], most: int, marks: Marks) -> str:
    """A mark, a name, a mark, the arguments; as often as there are calls."""
    mark, between = _mark("[TOOL_CALLS]", marks), _mark("[ARGS]", marks)
    more = f" ({mark} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"call_{i}: {_literal(name)} {between} args_{i}" for i, (name, _) in enumerate(tools)]
    heads = [f"calls: {mark} tail", f"tail: call{more}", _one_of("call", "call_", len(tools))]
    return "\n".join([*heads, *rules, *_arguments(tools)])


_Writer = Callable[[Sequence[tuple[str, dict[str, Any]]], int, Marks], str]
_WRITERS: dict[str, _Writer] = {"llama3": _llama, "mistral": _mistral, "mistral_named": _mistral_named}
