"""Finds the place in a JSON schema of a type that JSON lacks: the compiler names the type, but not the place."""

from collections.abc import Iterator
from typing import Any

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# Keywords whose values are a schema, a list of schemas, and schemas by name.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems")
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def wrong_type(schema: Any) -> str | None:
    """One sentence about the first type that JSON lacks, or None."""
    for path, part in _schemas(schema, ""):
        kinds = part.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind not in _TYPES:
                where = f"the schema at {path[1:]}" if path else "the schema"
                return f"{where} has the type {str(kind)[:40]!r}; use {', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
    return None


def _schemas(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`value` and all schemas in it, each with its path."""
    if not isinstance(value, dict):
        return
    yield path, value
    for key in _ONE:
        yield from _schemas(value.get(key), f"{path}.{key}")
    for key in _LIST:
        held = value.get(key)
        for number, one in enumerate(held if isinstance(held, list) else []):
            yield from _schemas(one, f"{path}.{key}[{number}]")
    for key in _NAMED:
        named = value.get(key)
        for name, one in (named if isinstance(named, dict) else {}).items():
            yield from _schemas(one, f"{path}.{key}.{name}")
