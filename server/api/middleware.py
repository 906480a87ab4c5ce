"""The middleware before every route: request id, Host check, API keys, and 503 while loading or draining.

Plain ASGI, so it costs nothing per chunk of a stream. It authorises on the ASGI path, never on a URL made from headers.
Deny by default: without a key only the routes named here are open.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config.allowed_hosts import AllowedHosts
from server.config.api_keys import ApiKeys, Key
from server.errors import HttpError, describe, error_response, retry_after
from server.observability.logs import event, logger
from server.observability.metrics import HttpCounters
from server.serving.server_state import Phase, ServerState

PROBES = frozenset({"/health", "/health/live", "/health/ready"})
ALWAYS_OPEN = PROBES | {"/version"}
ADMIN = "/admin/"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_LOADING_RETRY_S = 5.0
_log = logger("http")


class ApiMiddleware:
    """The outermost layer of the application: every request passes it."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        counters: HttpCounters,
        keys: ApiKeys,
        admin: ApiKeys,
        hosts: AllowedHosts,
        is_local: bool,
    ) -> None:
        """`is_local`: only this machine can reach the server."""
        self._app = app
        self._state = state
        self._counters = counters
        self._keys = keys
        self._admin = admin
        self._hosts = hosts
        self._open = ALWAYS_OPEN | ({"/metrics"} if is_local else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        headers = _first_headers(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {}).update(request_id=request_id, key=None)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        counted = False
        try:
            if scope["state"].get("crowded") and scope["path"] not in PROBES:
                raise _crowded()
            scope["state"]["key"] = self._check(scope["path"], headers)
            if scope["path"] not in self._open and scope["path"] != "/metrics":
                self._check_state(is_admin=scope["path"].startswith(ADMIN))
                self._state.enter()
                counted = True
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # the response has begun: no error can be sent any more, the server closes the connection
                raise
            answer = describe(error)
            if answer.status == 500:
                _log.error(event("request_failed", request_id=request_id, path=scope["path"]), exc_info=error)
            await error_response(answer)(scope, receive, send_with_id)
        finally:
            if counted:
                self._state.leave()
            self._counters.count(scope["method"], scope["path"], status)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> Key | None:
        """The API key of the request, if its route requires one. Raises `HttpError`."""
        # A foreign web page has no key, so a route that requires one needs no check of the Host header.
        requires_key = bool(self._keys) and path not in self._open
        if not requires_key and path not in ALWAYS_OPEN and headers.get(b"host", b"") not in self._hosts:
            raise _foreign_host(headers[b"host"])
        authorization = headers.get(b"authorization", b"")
        if path.startswith(ADMIN):
            self._check_admin(authorization)
            return None
        if not requires_key:
            return None
        key = self._keys.find(authorization)
        if key is None:
            raise _key_required("A valid API key")
        return key

    def _check_admin(self, authorization: bytes) -> None:
        """Raises `HttpError` unless the request has the admin key. Without one the admin routes are closed."""
        if not self._admin:
            message = "No admin key is set, so the admin routes are closed. Start the server with --admin-api-key KEY."
            raise HttpError(403, message, code="admin_disabled")
        if self._admin.find(authorization) is not None:
            return
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            raise _key_required("The admin key")
        raise HttpError(403, "This is not the admin key, which the admin routes require.", code="not_admin_key")

    def _check_state(self, is_admin: bool) -> None:
        """Raises `HttpError` unless requests are served. Admin requests are served while draining as well."""
        heartbeat, phase = self._state.heartbeat, self._state.phase
        serves = phase is Phase.READY or (is_admin and phase is Phase.DRAINING)
        if serves and heartbeat is not None and heartbeat.is_alive:
            return
        if phase is Phase.READY:  # the supervisor will notice in a moment
            phase = Phase.DEAD
        headers = retry_after(_LOADING_RETRY_S)
        if phase is Phase.DRAINING:
            headers["Connection"] = "close"
        elif phase is Phase.DEAD:
            headers["x-should-retry"] = "false"
        message = self._state.why_not_ready() or "The server is not ready."
        raise HttpError(503, message, code=f"server_{phase.value}", headers=headers)


def _crowded() -> HttpError:
    """The error on a connection beyond the limit, which only probes may use."""
    message = "All connections of this server are in use. Try again in a moment, or reuse one connection for more."
    return HttpError(503, message, code="too_many_connections", headers={"Connection": "close", **retry_after(1)})


def _foreign_host(header: bytes) -> HttpError:
    shown = header.decode("latin-1").rpartition(":")[0] or header.decode("latin-1")
    message = (
        f"The Host header names '{shown[:100]}', which is not a name of this server. Use its address, such as "
        "http://127.0.0.1, or start it with --allowed-hosts NAME."
    )
    return HttpError(403, message, code="host_not_allowed")


def _key_required(what: str) -> HttpError:
    message = f"{what} is required: send the header 'Authorization: Bearer KEY'."
    return HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _first_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    return found


def _request_id(given: bytes | None) -> str:
    """The client's id if it has only plain characters, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return secrets.token_hex(12)
