"""Errors in the shape of the API that a route belongs to: OpenAI's, but on the routes of messages Anthropic's.

Anthropic's is `{"type": "error", "error": {…}, "request_id": …}`.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from oarlock.server.errors import HttpError, error_object, error_response
from oarlock.server.http.request_record import request_id_of
from oarlock.server.json_text import dumps

MESSAGES = "/v1/messages"


def is_message_route(path: str) -> bool:
    """Whether clients of Anthropic's API call it."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def answer_of(error: HttpError, scope: Any) -> Response:
    """The whole HTTP response to the request of `scope`."""
    if not is_message_route(scope["path"]):
        return error_response(error)
    body = message_error_bytes(error, request_id_of(scope))
    return Response(body, error.status, error.headers, "application/json")


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """The body, or the data of a stream's event `error`."""
    kind = _TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    message = error_object(error)["message"]
    if error.param is not None and f"'{error.param}" not in message:  # there is no other place for the field's name
        message = f"{error.param}: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def message_error_bytes(error: HttpError, request_id: str) -> bytes:
    """The body as JSON."""
    return dumps(message_error(error, request_id)).encode("utf-8", "replace")
