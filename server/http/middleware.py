"""The middleware before every route: request id, checks of Host and Origin, API keys, 503 while loading or draining.

Plain ASGI, so it costs nothing per chunk of a stream. It authorises on the ASGI path, never on a URL made from headers.
Deny by default: without a key only the routes named here are open. `RootPath` wraps it if a proxy publishes the server
below a path of its own, such as `/llm`.

`Cors` decides which web pages of other origins may read responses (CORS, in the Fetch standard), and which may cause
changes. A browser asks before a page may read a response, but not before a form or a request without a body is sent, so
the page's origin is also checked for every request that may change something. Keys travel in a header that the page
itself sets, never in a cookie, so no response allows credentials.
"""

import re
import secrets
import time
from collections.abc import Iterable, Mapping

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oarlock.base.errors import StartupError
from oarlock.engine.errors import QueueFullError
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.config.option_checks import AllowedHosts
from oarlock.server.errors import MESSAGES, HttpError, describe, error_response, is_message_route, retry_after
from oarlock.server.http.api_keys import ApiKeys, Key
from oarlock.server.http.request_record import RequestRecord, label_of
from oarlock.server.http.server_state import Phase, ServerState
from oarlock.server.observability.logs import AccessLog, RefusalLog, event, logger
from oarlock.server.observability.metrics import HttpCounters

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
_OWN_PAGES = (b"same-origin", b"none")  # values of Sec-Fetch-Site; none: caused by the user, such as a typed address
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_METHODS = "GET, HEAD, POST"
_EXPOSED_HEADERS = b"X-Request-Id, Retry-After, X-Ignored-Parameters, X-Should-Retry"
_MAX_AGE_S = "7200"  # browsers do not cache the response to a preflight for longer
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_LONGEST_NAMES = 2048  # bytes


class Cors:
    """The origins whose pages may use the server."""

    def __init__(self, origins: Iterable[str]) -> None:
        """`origins`: such as `https://chat.example.org`; `*` for any."""
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of every response, including errors, so that the page can read it; empty if no origins."""
        if not self._origins:
            return []
        if b"*" in self._origins:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED_HEADERS)]
        vary = (b"vary", b"Origin")  # caches need it: without an origin the response has fewer headers
        origin = request.get(b"origin", b"")
        if origin not in self._origins:
            return [vary]
        return [
            vary,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED_HEADERS),
        ]

    def preflight(self, method: str, request: Mapping[bytes, bytes]) -> dict[str, str] | None:
        """Return additional response headers if this is a preflight request from an allowed origin, else None."""
        origin = request.get(b"origin")
        if method != "OPTIONS" or origin is None or b"access-control-request-method" not in request:
            return None
        if b"*" not in self._origins and origin not in self._origins:
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
        names = request.get(b"access-control-request-headers", b"")
        # listed one by one, because `*` would leave out Authorization
        if len(names) <= _LONGEST_NAMES and _NAMES.fullmatch(names):
            headers["Access-Control-Allow-Headers"] = names.decode("ascii")
        return headers

    def check(self, method: str, request: Mapping[bytes, bytes]) -> None:
        """Raise `HttpError` (403) if a page of a foreign origin that is not allowed sends a request that may change
        something.

        Programs other than browsers send neither header, and are not affected.
        """
        site, origin = request.get(b"sec-fetch-site"), request.get(b"origin") or None
        if method in _SAFE or (site is None and origin is None) or site in _OWN_PAGES:
            return
        if b"*" in self._origins or origin in self._origins:
            return
        # Browsers omit Sec-Fetch-Site if the address is neither HTTPS nor on this machine.
        if site is None and origin is not None and _is_own(origin, request):
            return
        shown = (origin or b"").decode("latin-1")[:100]
        allowed = shown if shown not in ("", "null") else "*"
        raise HttpError(
            403,
            f"A web page of another origin ({shown or 'not named'}) sent this request, which is not "
            f"allowed. To allow it, start the server with --allowed-origins '{allowed}'.",
            code="origin_not_allowed",
        )


def _is_own(origin: bytes, request: Mapping[bytes, bytes]) -> bool:
    """Return whether the origin is a page of this server: it names the requested host.

    Proxies that forward under another name put the requested host into X-Forwarded-Host. No foreign page can set that
    header: a browser would first ask for permission.
    """
    scheme, _, authority = origin.lower().partition(b"://")
    default = _DEFAULT_PORTS.get(scheme, b"")
    asked = (request.get(b"host", b""), request.get(b"x-forwarded-host", b"").partition(b",")[0])
    return bool(authority) and authority in [name.strip().lower().removesuffix(default) for name in asked]


PROBES = frozenset({"/health", "/health/live", "/health/ready"})
ALWAYS_OPEN = PROBES | {"/version"}
METRICS = frozenset({"/metrics", "/v1/state"})  # answered in every phase, to the same clients
ADMIN = "/admin/"
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # require the admin key as well
# explains a request; requires the admin key unless the server is open to all that can reach it
REQUESTS = "/v1/requests/"
# Records are kept of requests to these routes, which run on the engine.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/compact", MESSAGES})
POOLING = frozenset({"/v1/embeddings", "/pooling", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"})
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_LOADING_RETRY_S = 5.0
_log = logger("http")


class ApiMiddleware:
    """The outermost layer of the application, which handles every request."""

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        counters: HttpCounters,
        keys: ApiKeys,
        admin: ApiKeys,
        hosts: AllowedHosts,
        open_metrics: bool,
        open_requests: bool,
        page: frozenset[str],
        cors: Cors,
        access_log: AccessLog | None,
    ) -> None:
        """`open_metrics`: `METRICS` require no key. `open_requests`: `REQUESTS` requires no admin key. `page`: paths of
        the web page. The page holds no secret, so it is sent at any time and for any Host, and its requests to the API
        are checked like all others. `cors`: the foreign web pages that may send requests and read responses.
        """
        self._access_log = access_log
        self._refusals = RefusalLog()
        self._app = app
        self._state = state
        self._counters = counters
        self._keys = keys
        self._admin = admin
        self._hosts = hosts
        self._cors = cors
        self._any_host = ALWAYS_OPEN | page
        self._open = self._any_host | (METRICS if open_metrics else set())
        self._admin_routes = (ADMIN, *ADAPTERS) if open_requests else (ADMIN, *ADAPTERS, REQUESTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not supported")
        headers = _first_headers(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {}).update(request_id=request_id, key=None)
        status, num_bytes, record, span, received_s = 0, 0, None, None, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(b"x-request-id", request_id.encode()), *self._cors.headers(headers)]
                if is_message_route(scope["path"]):
                    more.append((b"request-id", request_id.encode()))
                if span is not None:
                    more.append((b"traceparent", span.traceparent))
                message["headers"] = [*message.get("headers", ()), *more]
            elif self._access_log is not None:
                num_bytes += len(message.get("body", b""))
            await send(message)

        counted = False
        try:
            if scope["state"].get("crowded") and scope["path"] not in PROBES:
                raise _crowded()
            _check_one_host(scope["headers"])
            preflight = self._cors.preflight(scope["method"], headers)
            if preflight is not None:  # browsers send a preflight without a key
                await Response(status_code=204, headers=preflight)(scope, receive, send_with_id)
                return
            scope["state"]["key"] = self._check(scope["path"], headers)
            self._cors.check(scope["method"], headers)
            if scope["path"] not in self._open | METRICS:
                self._check_state(is_admin=scope["path"].startswith((ADMIN, REQUESTS)))
                is_for_engine = scope["path"] in GENERATING | POOLING and scope["method"] == "POST"
                if is_for_engine:
                    self._check_room(scope)
                self._state.enter()
                counted = True
                if is_for_engine:
                    record = self._open_record(scope, request_id, received_s)
                    if (tracer := self._state.tracer) is not None:
                        span = tracer.begin(record, headers.get(b"traceparent"), headers.get(b"tracestate"))
            await self._app(scope, receive, send_with_id)
        except ENDS_TASK:
            raise
        except BaseException as error:
            if status:  # the response has begun, so no error can be sent; the server closes the connection
                raise
            problem = describe(error)
            if problem.status == 500:
                _log.error(event("request_failed", request_id=request_id, path=scope["path"]), exc_info=error)
            await error_response(problem, scope)(scope, receive, send_with_id)
        finally:
            if (held := scope["state"].get("held")) is not None:
                held.close()
            if record is not None:
                record.ended(status)
                if span is not None and self._state.tracer is not None:
                    self._state.tracer.end(span, record, self._state.async_llm)
            if counted:
                self._state.leave()
            self._counters.count(scope["method"], scope["path"], status)
            if self._access_log is not None:
                self._access_log.write(scope, request_id, status, num_bytes, time.monotonic() - received_s)

    def _check_room(self, scope: Scope) -> None:
        """Raise `QueueFullError` if the queue is full, before the body is read, parsed and tokenized."""
        async_llm = self._state.async_llm
        if async_llm is not None:
            try:
                async_llm.admission_queue.check_room(label_of(scope) or "")
            except QueueFullError:
                self._counters.refused_unread += 1
                self._refusals.count(time.monotonic())
                raise

    def _open_record(self, scope: Scope, request_id: str, received_s: float) -> RequestRecord:
        """Create the record of a request to generate, which can be looked up later."""
        key: Key | None = scope["state"]["key"]
        label = None if key is None else key.label
        record = scope["state"]["record"] = RequestRecord(request_id, scope["path"], label, received_s)
        self._state.requests.open(record)
        return record

    def _check(self, path: str, headers: dict[bytes, bytes]) -> Key | None:
        """Return the API key of the request, if its route requires one. Raises `HttpError`."""
        # A foreign web page has no key, so a route that requires one needs no check of the Host header.
        requires_key = bool(self._keys) and path not in self._open
        if not requires_key and path not in self._any_host and headers.get(b"host", b"") not in self._hosts:
            raise _foreign_host(headers[b"host"])
        authorization = headers.get(b"authorization", b"")
        if path.startswith(self._admin_routes):
            self._check_admin(authorization)
            return None
        if not requires_key:
            return None
        if not authorization and b"x-api-key" in headers:  # Anthropic's clients send the key in this header
            authorization = b"Bearer " + headers[b"x-api-key"]
        key = self._keys.find(authorization)
        if key is None:
            raise _key_required("A valid API key")
        return key

    def _check_admin(self, authorization: bytes) -> None:
        """Raise `HttpError` unless the request has the admin key. If none is set, the admin routes are closed."""
        if not self._admin:
            message = (
                "The admin routes are closed, because no admin key is set. Start the server with --admin-api-key KEY."
            )
            raise HttpError(403, message, code="admin_disabled")
        if self._admin.find(authorization) is not None:
            return
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            raise _key_required("The admin key")
        raise HttpError(403, "This is not the admin key, which the admin routes require.", code="not_admin_key")

    def _check_state(self, is_admin: bool) -> None:
        """Raise `HttpError` unless requests are served. Admin requests are served while draining as well."""
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
    """Return the error for a connection above the limit, which may only send probes."""
    message = (
        "All connections of this server are in use. Retry in a moment, and reuse a connection for several requests."
    )
    return HttpError(503, message, code="too_many_connections", headers={"Connection": "close", **retry_after(1)})


def _check_one_host(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise `HttpError` for two Host headers: a proxy may have checked the other one (RFC 9112, 3.2)."""
    if sum(name == b"host" for name, _ in headers) > 1:
        raise HttpError(400, "The request has more than one Host header. Send only one.", code="invalid_host")


def _foreign_host(header: bytes) -> HttpError:
    shown = header.decode("latin-1").rpartition(":")[0] or header.decode("latin-1")
    message = (
        f"The Host header '{shown[:100]}' is not a name of this server. Use its address, such as "
        "http://127.0.0.1, or start the server with --allowed-hosts NAME."
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
    """Return the client's id if it has only plain characters, else a new id."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return secrets.token_hex(12)


class RootPath:
    """Removes the root path from requests before any code that depends on paths, so that each route has one name."""

    def __init__(self, path: str, app: ASGIApp, routes: Iterable[str]) -> None:
        """`path`: begins with a slash and does not end with one. `routes`: of `app`, such as `/v1/models/{model}`.

        Raises `StartupError` if a request could match two routes.
        """
        for route in routes:
            fixed, parameter, _ = route.partition("{")
            if fixed == path or fixed.startswith(f"{path}/") or (parameter and path.startswith(fixed)):
                raise StartupError(
                    f"--root-path {path} is the same as the server's own route {route}.",
                    "Choose a path that no route of the server begins with: --root-path /llm",
                )
        self._path = path
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope.get("path", "")
        if asked == self._path:  # links of the web page are relative, so they need the trailing slash
            await RedirectResponse(f"{self._path}/", 308)(scope, receive, send)
            return
        if asked.startswith(f"{self._path}/"):
            scope = {name: value for name, value in scope.items() if name != "raw_path"}
            scope["path"] = asked.removeprefix(self._path)
        await self._app(scope, receive, send)
