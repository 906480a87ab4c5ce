"""Readable views of the OpenAPI document: parameters of request bodies as data and text, and the page at `/docs`.

The tables of the documentation are made from the same text. Types have their JSON names. The page loads nothing from
other servers, so it works without a network.
"""

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

# Keywords of JSON schema -> the names used here.
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
    """Return the names of the schemas that an operation's body may have."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    return [ref["$ref"].rsplit("/", 1)[1] for ref in schema.get("anyOf", [schema]) if "$ref" in ref]


def parameters(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    """Return all parameters of one request schema: type, range, default and effect."""
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
    if "x-effect" in described:
        found["effect"] = described["x-effect"]
    shapes = [_shape(schemas, form) for form in forms]
    flat = [shape for nested in shapes for shape in nested]
    return {**found, **flat[0]} if len(flat) == 1 else {**found, "forms": flat}


def _shape(schemas: dict[str, Any], form: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one format of a value, or several if it is a choice of formats."""
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
    """Return a text such as `number, 0 to 2`, `string of up to 512 characters` or `array of up to 64, each …`."""
    forms = parameter.get("forms", [parameter])
    return "; or ".join(dict.fromkeys(_form(form) for form in forms))


def default_text(parameter: dict[str, Any]) -> str:
    """Return the default as JSON in backquotes, `none` or `required`."""
    if parameter["required"]:
        return "required"
    default = parameter.get("default")
    return "none" if default in (None, []) else f"`{json.dumps(default, ensure_ascii=False)}`"


def behaviour(parameter: dict[str, Any]) -> str:
    """Return the parameter's effect in one sentence."""
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


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; } td, th { text-align: left; vertical-align: top;
padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #e4e4e4; } code, pre { font-family: ui-monospace, monospace;
background: #f5f5f5; } pre { padding: .8rem; overflow-x: auto; } .method { color: #06c; }
nav ul { columns: 22rem; list-style: none; padding: 0; font-size: .9rem; } nav li { break-inside: avoid; }
a { color: inherit; } h2 a { text-decoration: none; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } code, pre { background: #262626; }
td, th { border-color: #333; } .method { color: #6bf; } }
"""
# The page's policy allows only this style, by its digest; injected markup could not add another.
STYLE_SOURCE = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
_ICON = (
    "data:image/svg+xml;base64,"
    + base64.b64encode((Path(__file__).parent / "static" / "icon.svg").read_bytes()).decode()
)  # The icon is part of the page, so it works with --no-web-page too.


def page(document: dict[str, Any]) -> str:
    """Return the whole page as HTML."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<link rel="icon" href="{_ICON}"><meta name="viewport" content="width=device-width">',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{_rich(document['info'].get('description', ''))}",
        'The machine-readable document is <a href="openapi.json">openapi.json</a>.</p>',
        '<nav aria-label="Contents"><ul>',
        *(_entry(path, method, operation) for path, method, operation in operations),
        "</ul></nav>",
        *(_operation(document, path, method, operation) for path, method, operation in operations),
    ]
    return "\n".join([*parts, "</body></html>"])


def _entry(path: str, method: str, operation: dict[str, Any]) -> str:
    """Return one line of the table of contents."""
    link = f'<a href="#{_anchor(path, method)}">{_name(path, method)}</a>'
    return f"<li>{link} {_rich(operation.get('summary', ''))}</li>"


def _name(path: str, method: str) -> str:
    return f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code>'


def _anchor(path: str, method: str) -> str:
    """Return the link target of an operation; it has only unreserved characters."""
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{method}{path}").strip("-")


def _operation(document: dict[str, Any], path: str, method: str, operation: dict[str, Any]) -> str:
    anchor = _anchor(path, method)
    heading = f'<h2 id="{anchor}"><a href="#{anchor}">{_name(path, method)}</a></h2>'
    parts = [f"{heading}<p>{_rich(operation.get('summary', ''))}</p>"]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    for example in content.get("examples", {}).values():
        body = json.dumps(example["value"])
        parts.append(
            f"<pre>curl -s $URL{escape(path)} -H 'Content-Type: application/json' \\\n  -d '{escape(body)}'</pre>"
        )
    for schema in body_schemas(operation):
        rows = parameters(document["components"]["schemas"], schema)
        parts.append("<table><tr><th>parameter</th><th>range</th><th>default</th><th></th></tr>")
        for field, parameter in rows.items():
            texts = (range_text(parameter), default_text(parameter), behaviour(parameter))
            cells = (f"<code>{escape(field)}</code>", *map(_rich, texts))
            parts.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        parts.append("</table>")
    return "\n".join(parts)


def _rich(text: str) -> str:
    """Return escaped text, with parts between backquotes as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
