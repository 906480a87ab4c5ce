"""A parameter's type and range, default and behaviour as text, for the page at `/docs` and the documentation.

Types have their JSON names. The input is one parameter as `capabilities` describes it.
"""

from __future__ import annotations

import json
from typing import Any


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
    """What the parameter does, in one sentence."""
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
