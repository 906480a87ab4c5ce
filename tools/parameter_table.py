"""The table of the documentation: endpoint, parameter, range, default, behaviour, all read from the code.

Builds an application without an engine and reads its OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.app import application
from oarlock.server.endpoints.operations.route import endpoints
from oarlock.server.http.docs_page import behaviour, default_text, range_text
from oarlock.server.http.server_state import ServerState
from oarlock.server.observability.metrics import HttpCounters

# Bodies that another endpoint's section already shows.
_SAME_BODY = {
    "/v1/completions/render": "/v1/completions",
    "/v1/chat/completions/render": "/v1/chat/completions",
    "/v1/responses/input_tokens": "/v1/responses",
    "/v2/rerank": "/v1/rerank",
    "/rerank": "/v1/rerank",
    "/score": "/v1/score",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}
_REFUSED = "Known and not supported by any of these routes; a value is a 400, unless it asks for nothing: {}."
_GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def as_markdown() -> str:
    """Return the routes, then the parameters of each body. A row that an earlier table has is named, not repeated."""
    document = application(Settings(batch_dir="batches"), ServerState(), HttpCounters()).openapi()
    found = endpoints(document)
    lines = ["| route | |", "|---|---|"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines.append(f"| {method.upper()} `{path}` | {_cell(operation.get('summary', ''))} |")
    shared = found["/v1/completions"]["parameters"].keys() & found["/v1/chat/completions"]["parameters"].keys()
    both = {
        name: parameter
        for name, parameter in found["/v1/completions"]["parameters"].items()
        if name in shared and parameter == found["/v1/chat/completions"]["parameters"][name]
    }
    first_shown = dict.fromkeys(_rows(both), "/v1/completions")
    everywhere = set.intersection(*(set(found[path]["refused"]) for path in _GENERATING))
    lines += [
        "",
        "### `/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/messages`",
        *_table(both),
        "",
        _REFUSED.format(_names(sorted(everywhere))),
    ]
    for path, entry in found.items():
        if "parameters" not in entry or path in _SAME_BODY:
            continue
        is_generating = path in _GENERATING
        own = {
            name: parameter
            for name, parameter in entry["parameters"].items()
            if not (is_generating and parameter == both.get(name))
        }
        also = [other for other, shown in _SAME_BODY.items() if shown == path]
        lines += ["", f"### `{path}`" + (", and the same for " if also else "") + ", ".join(f"`{i}`" for i in also)]
        repeated: dict[str, list[str]] = {}
        for name, row in _rows(own):
            shown_at = first_shown.setdefault((name, row), path)
            if shown_at != path:
                repeated.setdefault(shown_at, []).append(name)
        named = {name for names in repeated.values() for name in names}
        lines += _table({name: parameter for name, parameter in own.items() if name not in named})
        for shown_at, names in repeated.items():
            lines += ["", f"As for `{shown_at}`: {_names(names)}."]
        if is_generating and (here := [name for name in entry["refused"] if name not in everywhere]):
            lines += ["", f"Nor are supported here: {_names(here)}."]
    return "\n".join(lines) + "\n"


def _table(parameters: dict[str, Any]) -> list[str]:
    rows = [row for _, row in _rows(parameters)]
    return ["", "| parameter | range | default | behaviour |", "|---|---|---|---|", *rows] if rows else []


def _rows(parameters: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield the name of each parameter and its row of a table."""
    for name, parameter in parameters.items():
        cells = (range_text(parameter), default_text(parameter), behaviour(parameter))
        yield name, f"| `{name}` | {' | '.join(map(_cell, cells))} |"


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in fields)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
