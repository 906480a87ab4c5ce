"""Base class of all routes: checks the query parameters, turns exceptions into error responses, and answers HEAD."""

from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oarlock.engine.errors import RequestError
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.errors import ClientGoneError, HttpError, describe, error_response
from oarlock.server.http.request_record import record_of, request_id_of
from oarlock.server.observability.logs import event, logger

# Clients of Azure and Anthropic append the version of their API to every URL. This server has only one version.
_VERSIONS = frozenset({"api-version", "beta"})
ANY_QUERY = "x-any-query"  # key of an OpenAPI operation: any query parameter is accepted and ignored
# Query parameters as they appear in the OpenAPI document.
QUERY_PARAMETERS: dict[str, dict[str, Any]] = {
    "after": {
        "description": "id of the last entry of the previous page",
        "schema": {"type": "string"},
    },
    "limit": {"description": "maximum number of entries", "schema": {"type": "integer", "minimum": 1}},
    "order": {
        "description": "order by time: newest first, or oldest first",
        "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    },
    "purpose": {
        "description": "only files with this purpose",
        "schema": {"type": "string", "enum": ["batch", "batch_output"]},
    },
}
_log = logger("requests")


class ErrorHandlingRoute(APIRoute):
    """A route that turns every exception, including unexpected ones, into an error body.

    A GET route answers HEAD with the same head; the connection omits the body. The route accepts only the query
    parameters of its OpenAPI operation.
    """

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            scope = {**scope, "method": "GET"}
        await super().handle(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        described = self.openapi_extra or {}
        takes_any = not self.include_in_schema or described.get(ANY_QUERY, False)
        names = frozenset(one["name"] for one in described.get("parameters", ()) if one["in"] == "query")

        async def answer(request: Request) -> Response:
            try:
                if not takes_any:
                    check_query(request.query_params, names)
                return await handle(request)
            except ClientGoneError:
                return Response(status_code=499)  # counted in the metrics, but nobody receives it
            except HttpError as error:
                return _answer(request, error)
            except (HTTPException, *ENDS_TASK):  # the framework handles its own exceptions
                raise
            except BaseException as error:  # a panic in a Rust library is not an `Exception`
                described = describe(error)
                if described.status == 500:
                    line = event("request_failed", request_id=request_id_of(request.scope), path=request.url.path)
                    _log.error(line, exc_info=error)
                return _answer(request, described)

        return answer


def _answer(request: Request, error: HttpError) -> Response:
    record = record_of(request.scope)
    if record is not None:
        record.failed(error)
    return error_response(error, request.scope)


def check_query(query: QueryParams, names: Collection[str]) -> None:
    """Raise `RequestError` for a parameter that is not in `names`, and for a parameter that is given twice."""
    given = Counter(name for name, _ in query.multi_items())
    for name, count in given.items():
        if name not in names and name not in _VERSIONS:
            there = f"the parameters are {', '.join(sorted(names))}" if names else "there are none"
            message = f"This route has no query parameter '{name[:64]}': {there}. Leave it out."
            raise RequestError(message, name[:64], "unknown_parameter")
        if count > 1 and name in names:
            raise RequestError(f"The query parameter '{name}' is given {count} times. Give it once.", name)


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The part of a list that a request asks for."""

    after: str | None = None  # id of the last entry that the client already knows
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"  # order of creation
    purpose: str | None = None

    @staticmethod
    def of(given: Mapping[str, str], *, limit: int, max_limit: int) -> "ListQuery":
        """Return the query for parameters whose names were checked. Raises `RequestError`."""
        text = given.get("limit", str(limit))
        if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= max_limit):
            raise RequestError(f"'limit' must be an integer from 1 to {max_limit}.", "limit")
        order = given.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError("'order' must be asc or desc.", "order")
        return ListQuery(given.get("after"), int(text), "asc" if order == "asc" else "desc", given.get("purpose"))
