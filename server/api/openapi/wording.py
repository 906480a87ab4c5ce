"""A parameter's range, default and behaviour in a few words, from what `capabilities` says of it.

For people: the page at `/docs` and the table of the documentation. Knows nothing of endpoints.
"""

from __future__ import annotations

import json
from typing import Any

_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "switch", "object": "object"}


def range_words(told: dict[str, Any]) -> str:
    """`0 to 2`, `text of up to 512 characters`, `list of up to 64 …`."""
    forms = told.get("forms", [told])
    return "; or ".join(dict.fromkeys(_form(form) for form in forms))


def default_words(told: dict[str, Any]) -> str:
    if told["required"]:
        return "required"
    default = told.get("default")
    return "none" if default in (None, []) else f"`{json.dumps(default, ensure_ascii=False)}`"


def behaviour(told: dict[str, Any]) -> str:
    return told.get("does", "")


def _form(form: dict[str, Any]) -> str:
    kind = form.get("type", "any")
    if "values" in form:
        return ", ".join(f"`{value}`" for value in form["values"])
    if "value" in form:
        return f"`{form['value']}`"
    if kind == "array":
        items = _form(form["items"]) if "items" in form else "anything"
        return f"list{_count(form, 'items')}, each {items}"
    if kind == "object":
        inner = f" of {', '.join(f'`{name}`' for name in form['parameters'])}" if "parameters" in form else ""
        entries = f" of up to {form['max_entries']:,} entries" if "max_entries" in form else ""
        return f"object{inner}{entries}"
    if kind == "string":
        return "text" + _length(form)
    return _numbers(form, kind)


def _numbers(form: dict[str, Any], kind: str) -> str:
    name = _TYPES.get(kind, kind)
    low, high = form.get("minimum"), form.get("maximum")
    if "above" in form:
        return f"{name} above {form['above']:,}" + ("" if high is None else f", at most {_big(high)}")
    if low is None and high is None:
        return name
    if low is None or high is None:
        return f"{name}, at least {_big(low)}" if low is not None else f"{name}, at most {_big(high or 0)}"
    return f"{name}, {_big(low)} to {_big(high)}"


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
