"""Errors in the shape of the API that a route belongs to: OpenAI's, but on the routes of messages Anthropic's."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from oarlock.server.errors import HttpError, error_response
from oarlock.server.serving.messages.errors import message_error_bytes
from oarlock.server.serving.request_context import request_id_of

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
