"""Arguments that a format writes as plain text: their interpretation by schema, and grammars for them.

A string is written without quotes, any other value as JSON. If a schema allows both, text in quotes is a string. So `5`
is a string or a number, depending on the schema.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, delimiter, literal, pattern_text, schema_rule

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_STRING = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's values, as some templates print them
_MAX_REFERENCES = 16
DEFINITIONS = ("$defs", "definitions")
# Keywords that constrain all arguments together; they cannot be enforced if each argument is a separate text.
_UNBOUND = frozenset(
    {"anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames", "maxProperties", "dependentRequired"}
) | {"dependentSchemas", "$ref", "const", "enum"}

_UNBOUND_TEXTS = ("anyOf", "oneOf", "allOf", "not", "if")  # keywords that cannot be enforced for a string

Schema = Mapping[str, Any]


def property_schema(schema: Schema, name: str) -> Any:
    """Return the schema of one argument, with references resolved; True if the schema does not describe it."""
    return resolved(_mapping(schema.get("properties")).get(name, True), schema)


def resolved(schema: Any, root: Schema) -> Any:
    """Return the schema that a chain of references within `root` leads to."""
    for _ in range(_MAX_REFERENCES):
        reference = _mapping(schema).get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            break
        schema = root
        for part in reference.split("/")[1:]:
            schema = _mapping(schema).get(part.replace("~1", "/").replace("~0", "~"), True)
    return schema


def is_text(schema: Any, root: Schema) -> bool:
    """Return whether only strings are allowed."""
    return admitted_types(schema, root) == _STRING


def json_value(text: str, schema: Any, root: Schema) -> str:
    """Return the JSON of the value that a text represents under its schema."""
    types = admitted_types(schema, root)
    if types == _STRING:
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    written = _WORDS.get(stripped, stripped)
    kind = _type_of(written)
    if kind is None or (kind not in types and "string" in types):
        return json.dumps(text, ensure_ascii=False)
    return written


def admitted_types(schema: Any, root: Schema, known: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """Return the JSON types that a schema allows; `number` includes `integer`.

    `known`: types of the parts visited so far, by their id.
    """
    schema = resolved(schema, root)
    known = {} if known is None else known
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = types = _ALL  # provisional, for a schema that contains itself
    given = _mapping(schema).get("type")
    if isinstance(given, str | list):
        types &= frozenset(name for name in ([given] if isinstance(given, str) else given) if isinstance(name, str))
    for values in (_mapping(schema).get("enum"), [schema["const"]] if "const" in _mapping(schema) else None):
        if isinstance(values, list):
            types &= frozenset(_type_of(json.dumps(value)) or "null" for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        branches = _mapping(schema).get(name)
        if isinstance(branches, list) and branches:
            inner = [admitted_types(branch, root, known) for branch in branches]
            types &= frozenset.intersection(*inner) if name == "allOf" else frozenset().union(*inner)
    known[id(schema)] = types = types | {"integer"} if "number" in types else types
    return types


def _type_of(text: str) -> str | None:
    """Return the type of a JSON text, None if it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        text.encode()
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {str: "string", float: "number", list: "array", dict: "object"}.get(type(value), "null")


def _refuse(constant: str) -> float:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def argument_names(schema: Schema) -> list[tuple[str, bool]]:
    """Return the arguments' names in schema order, each with whether it is required.

    Raises `RequestError` if the schema constrains all arguments together or a name cannot be written.
    """
    unbound = sorted(_UNBOUND & schema.keys())
    if unbound:
        message = (
            "This model writes each argument as separate text, so a forced call cannot follow "
            f"'{unbound[0]}' at the top of 'parameters'. Describe the arguments under 'properties', or let "
            "the model choose."
        )
        raise RequestError(message, "tools")
    required = schema.get("required")
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = _mapping(schema.get("properties"))
    names = [*(name for name in properties if properties[name] is not False), *required]
    unwritable = next((name for name in names if re.search(r"[<>\s]", name)), None)
    if unwritable is not None:
        message = (
            f"This model cannot write an argument name that contains brackets or white space: '{unwritable[:64]}'."
        )
        raise RequestError(message, "tools")
    return [(name, name in required) for name in dict.fromkeys(names)]


def value_rules(
    rule: str, root: Schema, name: str, wrap: str, ends: Sequence[str], special_ids: SpecialIds
) -> Sequence[str]:
    """Return rules for `rule`: the value of one argument, then `wrap`, then the first delimiter of `ends`.

    A parser ends the value at the other delimiters too, so the value must not contain them.
    """
    end, *others = ends
    schema = property_schema(root, name)
    ending = f"{literal(wrap)} {delimiter(end, special_ids)}" if wrap else delimiter(end, special_ids)
    if not is_text(schema, root):
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        return [f"{rule}: json_{rule} {ending}", schema_rule(f"json_{rule}", {**definitions, **_mapping(schema)})]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        words = [literal(value) for value in values if isinstance(value, str)]
        return [f"{rule}: ({' | '.join(words)}) {ending}"]
    return text_rules(rule, schema, wrap, end, special_ids, others)


def text_rules(
    rule: str, schema: Schema, wrap: str, end: str, special_ids: SpecialIds, without: Sequence[str] = ()
) -> list[str]:
    """Return rules for `rule`: a string of the schema without quotes, then `wrap`, then the delimiter `end`.

    `without`: texts that the string must not contain. Raises `RequestError` if the schema cannot be enforced.
    """
    unbound = next((name for name in _UNBOUND_TEXTS if name in schema), None)
    if unbound is not None:
        message = (
            f"This model writes strings without quotes, so '{unbound}' cannot be enforced in a forced call. "
            "Remove it from the schema of that argument, or let the model choose."
        )
        raise RequestError(message, "tools")
    # One terminal includes the end: no match is a prefix of another match, so it ends where the parser finds the end.
    closing = "" if end in special_ids else re.escape(end)
    patterns = [f"{body}{wrap}{closing}" for body in _text_patterns(schema)]
    written = " & ".join(f"/{pattern_text(pattern)}/" for pattern in patterns)
    # A special token never occurs in plain text.
    without = [re.escape(text) for text in without if text not in special_ids]
    if without:
        written += f" & ~/(?s:.*)(?:{pattern_text('|'.join(without))})(?s:.*)/"
    if end in special_ids:
        return [f"{rule}: {rule.upper()} {delimiter(end, special_ids)}", f"{rule.upper()}: {written}"]
    return [f"{rule}: {rule.upper()}", f"{rule.upper()}: {written} & ~/(?s:.*){pattern_text(closing)}(?s:.+)/"]


def _text_patterns(schema: Schema) -> list[str]:
    """Return regular expressions, all of which a string must match. `format` is only descriptive and not enforced."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    patterns = [f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        start = "" if pattern.startswith("^") else "(?s:.*)"
        is_ended = pattern.endswith("$") and not pattern.endswith("\\$")
        body = pattern.removeprefix("^")[: -1 if is_ended else None]
        patterns.append(f"{start}(?:{body}){'' if is_ended else '(?s:.*)'}")
    return patterns
