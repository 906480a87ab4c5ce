"""Parts of grammars that force calls: literals, delimiters, and rules for arguments that match their schema.

Grammars are in the Lark dialect of llguidance.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CALLS = 16  # a model that is forced to call must also be able to stop
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

ToolSchema = tuple[str, dict[str, Any]]  # function name, JSON schema of its arguments
SpecialIds = Mapping[str, int]  # delimiter -> token id, if it is a special token; all other delimiters are plain text


def schema_rule(name: str, schema: dict[str, Any]) -> str:
    """Return a rule for one JSON value of this schema, without unnecessary white space."""
    guided = {**schema, "x-guidance": {**_mapping(schema.get("x-guidance")), **_COMPACT}}
    return f"{name}: %json {literal(guided)}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def literal(value: Any) -> str:
    """Return a text or any JSON value as a grammar literal."""
    return json.dumps(value, ensure_ascii=False)


def pattern_text(pattern: str) -> str:
    """Escape a regular expression for use between slashes: a bare slash or line end would terminate it."""
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
    """Return the delimiter as its special token, or as plain text if it is not a special token."""
    return f"<[{special_ids[text]}]>" if text in special_ids else literal(text)


def delimited(text: str, delimiters: Sequence[str], special_ids: SpecialIds) -> str:
    """Return a text that may contain delimiters as a sequence of grammar symbols."""
    pieces = re.split("(" + "|".join(map(re.escape, delimiters)) + ")", text)
    return " ".join(delimiter(piece, special_ids) for piece in pieces if piece)


def one_of_calls(tools: Sequence[ToolSchema]) -> str:
    """Return the rule `call`, the alternatives `call_0`, `call_1` … for the tools."""
    return "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))


def arguments(tools: Sequence[ToolSchema]) -> list[str]:
    """Return rules `args_0`, `args_1` …: each tool's arguments, an object even if the schema has no type."""
    return [schema_rule(f"args_{i}", {"type": "object", **schema}) for i, (_, schema) in enumerate(tools)]


def call_objects(tools: Sequence[ToolSchema], key: str) -> list[str]:
    """Return rules for `call`: an object with the name and, under `key`, the arguments."""
    rules = []
    for index, (name, _) in enumerate(tools):
        head = literal(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ')
        rules.append(f"call_{index}: {head} args_{index} {literal('}')}")
    return [one_of_calls(tools), *rules, *arguments(tools)]


def pairs(rule: str, written: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    """Return rules for `rule`: pairs in the given order with separators; only required pairs are mandatory."""
    rules = [f"{rule}: {rule}_first_0"]
    for index, (pair, is_required) in enumerate(written):
        behind = f"{pair} {rule}_next_{index + 1}"
        skipped = f" | {rule}_first_{index + 1}", f" | {rule}_next_{index + 1}"
        rules.append(f"{rule}_first_{index}: {behind}{'' if is_required else skipped[0]}")
        rules.append(f"{rule}_next_{index}: {literal(separator)} {behind}{'' if is_required else skipped[1]}")
    return [*rules, f'{rule}_first_{len(written)}: ""', f'{rule}_next_{len(written)}: ""']


def text_then_calls(opening: str, special_ids: SpecialIds) -> tuple[str, str]:
    """Return the `ToolFormat.optional_calls` of a format whose calls begin with the delimiter `opening`."""
    if opening in special_ids:  # a special token never occurs in plain text
        return "words calls?", "words: /(?s:.*)/"
    inside = re.escape(opening)
    return "(WORDS | before tail)", (
        f"WORDS: /(?s:.*)/ & ~/(?s:.*{inside}.*)/\nbefore[suffix={literal(opening)}]: /(?s:.*)/"
    )
