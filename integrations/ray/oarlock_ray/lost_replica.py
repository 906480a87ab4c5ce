"""Answers whose replica is lost: a stream ends with an error event, and every error of Ray's own is in OpenAI's shape.

Without these layers of Ray's HTTP proxy a request whose replica is gone sees a closed connection, and other errors of
Ray are plain text. Ray calls `middlewares` in each proxy when the variable `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`
names it. Bytes that replicas send pass unchanged.
"""

from __future__ import annotations

import json

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oarlock_ray.prefix import PromptPrefix

CODE = "replica_lost"
_END = b"\n\n"  # of a server-sent event
_DONE = b"data: [DONE]" + _END
_BEFORE = "The replica that had this request is gone. Nothing of the answer was sent: send the request again."
_WITHIN = "The replica that wrote this answer is gone. The answer is not complete."
_OF_RAY = "/-/"  # the proxy's own routes, such as /-/healthz, are not for OpenAI's clients
_RETRY_AFTER = (b"retry-after", b"1")
# Type and code for the status of what Ray itself says. A replica's errors are JSON, and never plain text.
_OWN_ERRORS = {
    404: ("invalid_request_error", "route_not_found"),
    408: ("invalid_request_error", "timeout"),
    429: ("rate_limit_error", "queue_full"),
    503: ("server_error", "no_replica"),
}


def middlewares() -> list[Middleware]:
    """Middleware that Ray puts around its proxy."""
    return [Middleware(LostReplica), Middleware(PromptPrefix)]


class LostReplica:
    """Completes what Ray's proxy leaves incomplete, and puts its plain text into OpenAI's shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OF_RAY):
            await self._app(scope, receive, send)
            return
        started = ended = events = False
        own: Message | None = None  # the beginning of an error of Ray's, which waits for its text
        text = b""

        async def watched(message: Message) -> None:
            nonlocal started, ended, events, own, text
            if message["type"] == "http.response.start":
                started, events = True, is_event_stream(message["headers"])
                if message["status"] in _OWN_ERRORS and _has_type(message["headers"], b"text/plain"):
                    own = message
                    return
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
                if own is not None:
                    text += message.get("body", b"")
                    if ended:
                        await _send_own_error(send, own, text)
                    return
            await send(message)

        await self._app(scope, receive, watched)
        if ended:
            return
        if events:
            await send({"type": "http.response.body", "body": error_event(_WITHIN, CODE)})
        elif not started:
            await send_error(send, 503, _BEFORE, CODE)
        # A plain answer that has begun cannot be mended: the server closes the connection.


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the headers of a response announce events."""
    return _has_type(headers, b"text/event-stream")


def _has_type(headers: list[tuple[bytes, bytes]], kind: bytes) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(kind) for name, value in headers)


async def _send_own_error(send: Send, start: Message, text: bytes) -> None:
    """An error of Ray's, with its own words and its own time to wait, if it named one."""
    kind, code = _OWN_ERRORS[start["status"]]
    waits = [(name, value) for name, value in start["headers"] if name.lower() == b"retry-after"]
    if start["status"] == 503 and not waits:
        waits = [_RETRY_AFTER]
    await _send_json(send, start["status"], error_body(text.decode(errors="replace"), code, kind), waits)


async def send_error(send: Send, status: int, message: str, code: str) -> None:
    """A whole answer. Official clients send the request again after a 503."""
    await _send_json(send, status, error_body(message, code), [_RETRY_AFTER] if status == 503 else [])


async def _send_json(send: Send, status: int, body: bytes, more_headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class WholeEvents:
    """Cuts a stream of bytes where events end. The bytes that come out are those that went in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The events that are complete with `piece`; the beginning of the next one is kept."""
        self._rest += piece
        end = self._rest.rfind(_END)
        if end < 0:
            return b""
        whole, self._rest = self._rest[: end + len(_END)], self._rest[end + len(_END) :]
        return whole

    def rest(self) -> bytes:
        """Bytes after the last event, when the stream has ended as it should."""
        return self._rest


def error_body(message: str, code: str, kind: str = "server_error") -> bytes:
    """The body of an error. `kind`: OpenAI's `type`."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_event(message: str, code: str) -> bytes:
    """The last events of a stream that broke off."""
    return b"data: " + error_body(message, code) + _END + _DONE
