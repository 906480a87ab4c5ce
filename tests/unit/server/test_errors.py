"""Error bodies: their status, type and code, and the length of their messages."""

from __future__ import annotations

import json

import pytest

from oarlock.engine.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from oarlock.server.errors import MAX_MESSAGE, HttpError, ModelNotFoundError, describe, error_bytes


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("m", "temperature"), 400, "invalid_request_error", None),
        (ModelNotFoundError("x" * 5000, ("demo",)), 404, "invalid_request_error", "model_not_found"),
        (QueueFullError("m", 2), 429, "rate_limit_error", "queue_full"),
        (EngineError("m"), 500, "server_error", "engine_error"),
        (EngineDeadError("m"), 503, "server_error", "engine_dead"),
        (HttpError(401, "m"), 401, "authentication_error", None),
        (ZeroDivisionError("secret"), 500, "server_error", None),
    ],
)
def test_every_error_has_four_keys(error, status, kind, code):
    answer = describe(error)
    body = json.loads(error_bytes(answer))["error"]
    assert answer.status == status
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["type"], body["code"]) == (kind, code)
    assert "secret" not in body["message"]


def test_messages_are_short_and_always_encodable():
    body = json.loads(error_bytes(HttpError(400, "\ud800" + "x" * 10_000)))
    assert len(body["error"]["message"]) == MAX_MESSAGE
