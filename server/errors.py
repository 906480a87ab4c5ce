"""Conversion of exceptions to HTTP error responses, in the format of the API that the route belongs to.

An error in OpenAI's format always has four keys. The `/v1/messages` routes use Anthropic's format: `{"type": "error",
"error": {…}, "request_id": …}`. The class of an exception decides, and the code of an error about an adapter, but never
its text.
"""

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from oarlock.engine.errors import EngineDeadError, EngineError, QueueFullError, RequestError, UnavailableError
from oarlock.server.json_text import dumps

MAX_MESSAGE = 2048
INVALID = "invalid_request_error"
_STATUS_TYPES = {401: "authentication_error", 403: "permission_error", 404: INVALID, 429: "rate_limit_error"}
MESSAGES = "/v1/messages"
_MESSAGE_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class HttpError(Exception):
    """An error response that the HTTP layer itself decides on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class ModelNotFoundError(RequestError):
    """A request for a model that is not served (404)."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        shown = name if len(name) <= 64 else name[:64] + "…"
        super().__init__(
            f"The model '{shown}' does not exist. This server has: {', '.join(served)}.", "model", "model_not_found"
        )


class DeadlineError(Exception):
    """The request's own time limit, which passed before anything was generated (408)."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"Nothing was generated within the request's time limit of {seconds:g} seconds.")


class ClientGoneError(Exception):
    """A connection that the client closed before the response was complete."""


def describe(error: BaseException) -> HttpError:
    """Return the HTTP error for any exception. An exception that is not Oarlock's own becomes a 500 without details."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ModelNotFoundError):
        return HttpError(404, error.message, param=error.param, code=error.code)
    if isinstance(error, RequestError):
        # An adapter may be unloaded after the request was accepted.
        status = 404 if error.code in ("adapter_not_found", "adapter_unloaded") else 400
        return HttpError(status, error.message, param=error.param, code=error.code)
    if isinstance(error, DeadlineError):  # the client set the limit, so it should not retry by itself
        return HttpError(408, str(error), param="timeout", code="timeout", headers={"x-should-retry": "false"})
    if isinstance(error, QueueFullError):
        return HttpError(429, error.message, code="queue_full", headers=retry_after(error.retry_after_s))
    if isinstance(error, EngineDeadError):
        message = "The engine has stopped and this server is shutting down. Send the request to another server."
        return HttpError(503, message, code="engine_dead", headers={"x-should-retry": "false"})
    if isinstance(error, UnavailableError):
        return HttpError(503, error.message, code=error.code, headers=retry_after(1))
    if isinstance(error, EngineError):
        return HttpError(500, f"The engine failed on this request: {error}", code="engine_error")
    return HttpError(500, "Internal error. See the server's log for details under this request's id.")


def error_object(error: HttpError) -> dict[str, Any]:
    """Return the value of `error` in the body: exactly four keys."""
    kind = _STATUS_TYPES.get(error.status) or (INVALID if error.status < 500 else "server_error")
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[: MAX_MESSAGE - 1] + "…"
    return {"message": message, "type": kind, "param": error.param, "code": error.code}


def error_bytes(error: HttpError) -> bytes:
    """Return the whole error body as JSON."""
    return dumps({"error": error_object(error)}).encode("utf-8", "replace")


def error_response(error: HttpError, scope: Scope) -> Response:
    """Return the whole HTTP response to the request of `scope`."""
    body = error_bytes(error)
    if is_message_route(scope["path"]):
        body = dumps(message_error(error, scope["state"]["request_id"])).encode("utf-8", "replace")
    return Response(body, error.status, error.headers, "application/json")


def is_message_route(path: str) -> bool:
    """Return whether clients of Anthropic's API use this path."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def message_error(error: HttpError, request_id: str) -> dict[str, Any]:
    """Return the body of an error on a `/v1/messages` route, or the data of a stream's `error` event."""
    kind = _MESSAGE_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    message = error_object(error)["message"]
    # This format has no other field for the parameter's name.
    if error.param is not None and f"'{error.param}" not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def retry_after(seconds: float) -> dict[str, str]:
    """Return the Retry-After header, which official clients follow before a retry."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
