"""Pieces of grammars that force calls: literals, delimiters, and rules for arguments bound to their schema.

Grammars are in the Lark dialect of llguidance.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CALLS = 16  # a model that is forced to call must also come to an end
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

ToolSchema = tuple[str, dict[str, Any]]  # a function's name, and the JSON schema of its arguments
SpecialIds = Mapping[str, int]  # the ids of those delimiters that are special tokens; the others are plain text


def schema_rule(name: str, schema: dict[str, Any]) -> str:
    """A rule that is one JSON value of this schema, without needless white space."""
    guided = {**schema, "x-guidance": {**_mapping(schema.get("x-guidance")), **_COMPACT}}
    return f"{name}: %json {literal(guided)}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def literal(value: Any) -> str:
    """A text, or any JSON, as a grammar holds it."""
    return json.dumps(value, ensure_ascii=False)


def pattern_text(pattern: str) -> str:
    """The expression between slashes: a bare slash or line end inside would end it."""
    result: list[str] = []
    after_backslash = False
    for character in pattern:
        written = character
        if character == "\n":
            written = "\\n"
        elif character == "/" and not after_backslash:
            written = "\\/"
        result.append(written)
        after_backslash = character == "\\" and not after_backslash
    return "".join(result)


def delimiter(text: str, special_ids: SpecialIds) -> str:
    """The delimiter as its special token, or as plain text."""
    return f"<[{special_ids[text]}]>" if text in special_ids else literal(text)


def delimited(text: str, delimiters: Sequence[str], special_ids: SpecialIds) -> str:
    """A text that may hold delimiters, as a sequence of what they and the rest are in a grammar."""
    pieces = re.split("(" + "|".join(map(re.escape, delimiters)) + ")", text)
    return " ".join(delimiter(piece, special_ids) for piece in pieces if piece)


def one_of_calls(tools: Sequence[ToolSchema]) -> str:
    """Rule `call`: any of `call_0`, `call_1` …, one for each tool."""
    return "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))


def arguments(tools: Sequence[ToolSchema]) -> list[str]:
    """Rules `args_0`, `args_1` …: each tool's arguments, an object even where the schema does not say so."""
    return [schema_rule(f"args_{i}", {"type": "object", **schema}) for i, (_, schema) in enumerate(tools)]


def call_objects(tools: Sequence[ToolSchema], key: str) -> list[str]:
    """Rules for `call`: an object with the name and, under `key`, the arguments."""
    rules = []
    for index, (name, _) in enumerate(tools):
        head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        rules.append(f"call_{index}: {head} args_{index} {literal('}')}")
    return [one_of_calls(tools), *rules, *arguments(tools)]


def pairs(rule: str, written: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Rules for `rule`: pairs in their order, with separators between them; only required ones have to come."""
    rules = [f"{rule}: {rule}_first_0"]
    for index, (pair, is_required) in enumerate(written):
        behind = f"{pair} {rule}_next_{index + 1}"
        skipped = f" | {rule}_first_{index + 1}", f" | {rule}_next_{index + 1}"
        rules.append(f"{rule}_first_{index}: {behind}{'' if is_required else skipped[0]}")
        rules.append(f"{rule}_next_{index}: {literal(separator)} {behind}{'' if is_required else skipped[1]}")
    return [*rules, f'{rule}_first_{len(written)}: ""', f'{rule}_next_{len(written)}: ""']


def text_then_calls(opening: str, special_ids: SpecialIds) -> tuple[str, str]:
    """Rules of `ToolFormat.optional_calls` for a format whose calls begin with the delimiter `opening`."""
    if opening in special_ids:  # a special token is never part of a text
        return "words calls?", "words: /(?s:.*)/"
    inside = re.escape(opening)
    return "(WORDS | before tail)", (
        f"WORDS: /(?s:.*)/ & ~/(?s:.*{inside}.*)/\nbefore[suffix={literal(opening)}]: /(?s:.*)/"
    )
