"""Errors in the shape that clients of `/v1/messages` read: `{"type": "error", "error": {…}, "request_id": …}`."""

from __future__ import annotations

from typing import Any

from oarlock.server.errors import HttpError, error_object
from oarlock.server.json_text import dumps

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
    """The same as JSON."""
    return dumps(message_error(error, request_id)).encode("utf-8", "replace")
