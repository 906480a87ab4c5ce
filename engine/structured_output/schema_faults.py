"""Errors about the part of a JSON schema that cannot be enforced: one sentence with its path and an alternative.

The library names only the keyword, not its path. Knows JSON schemas and the texts of the library's errors.
"""

import re
from collections.abc import Callable
from typing import Any

from oarlock.engine.structured_output.json_schema import TYPES, Schema, schemas

# keyword -> alternative
_ALTERNATIVES = {
    "uniqueItems": "remove it and drop repeated items yourself, or list the values as boolean properties",
    "propertyNames": "name the properties in `properties`, or give one expression in `patternProperties`",
    "not": "specify the allowed values with an enum, a pattern or anyOf",
    "if": "use anyOf with one branch for each case",
    "then": "use anyOf with one branch for each case",
    "else": "use anyOf with one branch for each case",
    "contains": "describe the first items with prefixItems, or all items with items",
    "dependentRequired": "use anyOf with one branch for each case",
    "dependentSchemas": "use anyOf with one branch for each case",
    "dependencies": "use anyOf with one branch for each case",
    "unevaluatedProperties": "write one object with all properties and additionalProperties: false",
    "unevaluatedItems": "use prefixItems with items: false",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
}
_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_FORMAT = re.compile(r"Unknown format: (\S+)")


def fault_of(schema: Any, error: str) -> str | None:
    """Return a sentence about the part of `schema` that caused the library's `error`, or None if it is not known."""
    for rule in (_wrong_type, _unknown_format, _unsupported_key, _overlap, _look_around):
        fault = rule(schema, error)
        if fault is not None:
            return fault
    return None


def _location(schema: Any, has: Callable[[Schema], bool]) -> str | None:
    """Return the path of the first part of a schema for which `has` is true, as text, or None."""
    path = next((path for path, part in schemas(schema) if has(part)), None)
    if path is None:
        return None
    return f"the schema at {path[1:]}" if path else "the schema"


def _wrong_type(schema: Any, error: str) -> str | None:
    del error  # the library has several errors for this
    for path, part in schemas(schema):
        kinds = part.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind not in TYPES:
                location = f"the schema at {path[1:]}" if path else "the schema"
                return f"{location} has the type {str(kind)[:40]!r}; use {', '.join(TYPES[:-1])} or {TYPES[-1]}"
    return None


def _unknown_format(schema: Any, error: str) -> str | None:
    match = _FORMAT.search(error)
    location = match and _location(schema, lambda part: part.get("format") == match[1])
    if not match or not location:
        return None
    return f"{location} has the unknown format '{match[1][:40]}'; remove it, or use a pattern instead"


def _unsupported_key(schema: Any, error: str) -> str | None:
    match = _KEYS.search(error)
    key = match and match[1].split(",")[0].strip(' "')
    location = key and _location(schema, lambda part: key in part)
    if not location:
        return None
    alternative = _ALTERNATIVES.get(key, "remove it")
    return f"{location} has '{key}', which cannot be enforced during generation; {alternative}"


def _overlap(schema: Any, error: str) -> str | None:
    location = _location(schema, lambda part: "oneOf" in part) if error.startswith("oneOf") else None
    if location is None:
        return None
    return (
        f"{location} has a oneOf whose branches may both match; use anyOf, or give each branch a property with a "
        "different const"
    )


def _look_around(schema: Any, error: str) -> str | None:
    marks = ("(?=", "(?!", "(?<=", "(?<!")
    if "look-around" not in error:
        return None
    location = _location(schema, lambda part: any(mark in str(part.get("pattern", "")) for mark in marks))
    if location is None:
        return None
    return f"{location} has a pattern with look-around; only (?=…) directly after ^ is supported; rewrite the others"
