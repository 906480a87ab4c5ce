"""Parameters of request bodies, read from the OpenAPI document: as data, and as text for the page at `/docs`.

The documentation's tables are made from the text as well. Types have their JSON names.
"""

from __future__ import annotations

import json
from typing import Any

# Keywords of JSON schema, and the names of the same limits here.
_LIMITS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusiveMinimum": "above",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_items",
    "maxItems": "max_items",
    "maxProperties": "max_entries",
    "pattern": "pattern",
    "enum": "values",
    "const": "value",
}


def body_schemas(operation: dict[str, Any]) -> list[str]:
    """The names of the schemas that an operation's body may have."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    return [ref["$ref"].rsplit("/", 1)[1] for ref in schema.get("anyOf", [schema]) if "$ref" in ref]


def parameters(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    """Every parameter of one request schema: type, range, default, and what it does."""
    schema = schemas[name]
    required = schema.get("required", [])
    return {
        field: _parameter(schemas, described, field in required) for field, described in schema["properties"].items()
    }


def _parameter(schemas: dict[str, Any], described: dict[str, Any], is_required: bool) -> dict[str, Any]:
    forms = [form for form in described.get("anyOf", [described]) if form.get("type") != "null"]
    found: dict[str, Any] = {"required": is_required, "nullable": len(forms) < len(described.get("anyOf", [described]))}
    if not is_required:
        found["default"] = described.get("default")
    if "description" in described:
        found["does"] = described["description"]
    if described.get("x-effect") == "none":
        found["effect"] = "none"
    shapes = [_shape(schemas, form) for form in forms]
    flat = [shape for nested in shapes for shape in nested]
    return {**found, **flat[0]} if len(flat) == 1 else {**found, "forms": flat}


def _shape(schemas: dict[str, Any], form: dict[str, Any]) -> list[dict[str, Any]]:
    """One form of a value, or several if it is a choice of forms."""
    if "oneOf" in form or "anyOf" in form:
        return [shape for inner in form.get("oneOf", form.get("anyOf")) for shape in _shape(schemas, inner)]
    if "$ref" in form:
        name = form["$ref"].rsplit("/", 1)[1]
        return [{"type": "object", "parameters": parameters(schemas, name)}]
    shape: dict[str, Any] = {"type": form.get("type", "any")}
    shape |= {name: form[keyword] for keyword, name in _LIMITS.items() if keyword in form}
    if isinstance(form.get("items"), dict):
        inner = form["items"]
        shape["items"] = {"type": "object"} if "$ref" in inner else _shape(schemas, inner)[0]
    return [shape]


def range_text(parameter: dict[str, Any]) -> str:
    """`number, 0 to 2`, `string of up to 512 characters`, `array of up to 64, each …`."""
    forms = parameter.get("forms", [parameter])
    return "; or ".join(dict.fromkeys(_form(form) for form in forms))


def default_text(parameter: dict[str, Any]) -> str:
    """The default as JSON in backquotes, `none` or `required`."""
    if parameter["required"]:
        return "required"
    default = parameter.get("default")
    return "none" if default in (None, []) else f"`{json.dumps(default, ensure_ascii=False)}`"


def behaviour(parameter: dict[str, Any]) -> str:
    """The parameter's effect, in one sentence."""
    return parameter.get("does", "")


def _form(form: dict[str, Any]) -> str:
    kind = form.get("type", "any")
    if "values" in form:
        return ", ".join(f"`{value}`" for value in form["values"])
    if "value" in form:
        return f"`{form['value']}`"
    if kind == "array":
        items = _form(form["items"]) if "items" in form else "anything"
        return f"array{_count(form, 'items')}, each {items}"
    if kind == "object":
        inner = f" of {', '.join(f'`{name}`' for name in form['parameters'])}" if "parameters" in form else ""
        entries = f" of up to {form['max_entries']:,} entries" if "max_entries" in form else ""
        return f"object{inner}{entries}"
    if kind == "string":
        return "string" + _length(form)
    return _numbers(form, kind)


def _numbers(form: dict[str, Any], kind: str) -> str:
    low, high = form.get("minimum"), form.get("maximum")
    if "above" in form:
        return f"{kind} above {form['above']:,}" + ("" if high is None else f", at most {_big(high)}")
    if low is None and high is None:
        return kind
    if low is None or high is None:
        return f"{kind}, at least {_big(low)}" if low is not None else f"{kind}, at most {_big(high or 0)}"
    return f"{kind}, {_big(low)} to {_big(high)}"


def _big(value: float) -> str:
    for power in (31, 63):
        if value in (2**power - 1, -(2**power)):
            return f"2^{power} - 1" if value > 0 else f"-2^{power}"
    return f"{value:,}"


def _length(form: dict[str, Any]) -> str:
    low, high = form.get("min_length"), form.get("max_length")
    if high is None:
        return "" if not low else f" of at least {low}"
    return f" of {low} to {high:,} characters" if low else f" of up to {high:,} characters"


def _count(form: dict[str, Any], what: str) -> str:
    low, high = form.get(f"min_{what}"), form.get(f"max_{what}")
    if high is None:
        return "" if not low else f" of at least {low}"
    return f" of {low} to {high:,}" if low else f" of up to {high:,}"
