"""The OpenAPI document as one HTML page that loads nothing from elsewhere: it works without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from oarlock.server.http.openapi.parameters import behaviour, body_schemas, default_text, parameters, range_text

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
# The one style that the page's policy allows, by its digest: text from elsewhere could not add another.
STYLE_SOURCE = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"


_ICON = (
    "data:image/svg+xml;base64,"
    + base64.b64encode((Path(__file__).parents[1] / "static" / "icon.svg").read_bytes()).decode()
)  # a part of the page, which is there with --no-web-page too


def page(document: dict[str, Any]) -> str:
    """Write the whole page."""
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
    """Write a line of the contents."""
    link = f'<a href="#{_anchor(path, method)}">{_name(path, method)}</a>'
    return f"<li>{link} {_rich(operation.get('summary', ''))}</li>"


def _name(path: str, method: str) -> str:
    return f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code>'


def _anchor(path: str, method: str) -> str:
    """Make a name for links to the part about an operation: unreserved characters alone."""
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
    """Escaped, with text between backquotes as code."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))
