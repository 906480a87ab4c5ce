"""Query parameters: which part of a list is wanted, and the refusal of names that a route does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import QueryParams

from oarlock.engine.errors import RequestError

# Clients of Azure and of Anthropic put the version of their API behind every address. Here is one version.
_VERSIONS = frozenset({"api-version", "beta"})

# As they stand in the OpenAPI document.
QUERY_PARAMETERS: dict[str, dict[str, Any]] = {
    "after": {
        "description": "the id of the last entry that is known already: the list begins behind it",
        "schema": {"type": "string"},
    },
    "limit": {"description": "how many entries at most", "schema": {"type": "integer", "minimum": 1}},
    "order": {
        "description": "by time: the newest first, or the oldest",
        "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    },
    "purpose": {
        "description": "only files with this purpose",
        "schema": {"type": "string", "enum": ["batch", "batch_output"]},
    },
}


def check_query(query: QueryParams, names: Collection[str]) -> None:
    """Raise `RequestError` for a parameter that is not one of `names`, and for one that is given twice."""
    given = Counter(name for name, _ in query.multi_items())
    for name, count in given.items():
        if name not in names and name not in _VERSIONS:
            there = f"there are {', '.join(sorted(names))}" if names else "it has none"
            message = f"This route has no query parameter '{name[:64]}': {there}. Leave it out."
            raise RequestError(message, name[:64], "unknown_parameter")
        if count > 1 and name in names:
            raise RequestError(f"The query parameter '{name}' is given {count} times. Give it once.", name)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which part of a list is wanted."""

    after: str | None = None  # the id of the last one that is known already
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"  # by time of creation
    purpose: str | None = None

    @staticmethod
    def of(given: Mapping[str, str], *, limit: int, max_limit: int) -> ListQuery:
        """From parameters whose names were checked. Raises `RequestError`."""
        text = given.get("limit", str(limit))
        if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= max_limit):
            raise RequestError(f"'limit' must be a whole number from 1 to {max_limit}.", "limit")
        order = given.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("'order' must be asc or desc.", "order")
        return ListQuery(given.get("after"), int(text), "asc" if order == "asc" else "desc", given.get("purpose"))
