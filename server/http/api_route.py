"""The class of all routes: every exception becomes an error response, and GET routes answer HEAD."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oarlock.server.errors import ClientGoneError, HttpError, describe
from oarlock.server.http.error_shape import answer_of
from oarlock.server.http.list_query import check_query
from oarlock.server.http.openapi.document import ANY_QUERY
from oarlock.server.http.request_record import record_of, request_id_of
from oarlock.server.observability.logs import event, logger

_log = logger("requests")


class ErrorHandlingRoute(APIRoute):
    """A route whose every exception becomes an error body, unexpected ones included. One for GET answers HEAD with the
    same head; the connection leaves the body out. It takes the query parameters of its OpenAPI operation alone."""

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
                return Response(status_code=499)  # only the counters see it
            except HttpError as error:
                return _answer(request, error)
            except Exception as error:
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
    return answer_of(error, request.scope)
