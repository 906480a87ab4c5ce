"""The pieces that JSON schemas of responses are put together from."""

from __future__ import annotations

from typing import Any

STRING = {"type": "string"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
IDS = {"type": "array", "items": COUNT}


def nullable(shape: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [shape, {"type": "null"}]}


def list_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": shape}


def object_of(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
