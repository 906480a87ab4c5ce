"""An ASGI application that forwards every request to a server on loopback, body and events byte for byte as they come.

A server that ends within an answer ends it with an error event; one that is gone before is a 503. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from oarlock_ray.lost_replica import CODE, WholeEvents, error_event, is_event_stream, send_error
from oarlock_ray.policy import load_of
from oarlock_ray.prefix import HEADER

# RFC 9110, 7.6.1: these belong to one connection.
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
_NOT_PASSED_ON = _HOP_BY_HOP | {HEADER}  # the chain of the prompt is for the request router alone
_NOT_PASSED_BACK = _HOP_BY_HOP | {b"date", b"x-request-id"}  # the proxy adds its own
_NOT_AGAIN = b"x-should-retry"
_NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_CHECK_TIMEOUT = aiohttp.ClientTimeout(total=10)
_BEFORE = "This replica has lost its server. Nothing of the answer was sent: send the request again."
# The server answers them to its own host without a key, and one replica of many says little.
_NO_METRICS = (
    "A replica's metrics are not served through the proxy; oarlock_requests_waiting and _running are in Ray's."
)
_WITHIN = "The server of this replica ended within the answer, which is not complete."


class ClientGoneError(Exception):
    """The client left while it was still sending."""


class Forwarder:
    """Make it in a running event loop, and `close` it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
        )
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def close(self) -> None:
        await self._session.close()

    async def idle(self) -> None:
        """Until no answer is being written."""
        await self._idle.wait()

    async def check_health(self) -> None:
        """Raises `RuntimeError` with the server's reason, or what the connection says, when it is not healthy."""
        try:
            async with self._session.get(f"{self._url}/health", timeout=_CHECK_TIMEOUT) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"/health answers {answer.status}: {await answer.text()}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise RuntimeError(f"/health does not answer: {error!r}") from None

    async def load(self) -> dict[str, float]:
        """Requests that wait and that run, over all engines of the server."""
        async with self._session.get(f"{self._url}/metrics", timeout=_CHECK_TIMEOUT) as answer:
            return load_of(await answer.text())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} connections are not served")
        if scope["path"].removeprefix(scope.get("root_path", "")) == "/metrics":
            await send_error(send, 404, _NO_METRICS, "not_found")
            return
        self._open += 1
        self._idle.clear()
        try:
            await self._forward(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = CIMultiDict(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.lower() not in _NOT_PASSED_ON
        )
        try:
            answer = await self._session.request(
                scope["method"],
                URL(self._url + target(scope), encoded=True),
                headers=headers,
                data=await _body(receive),
                allow_redirects=False,
            )
        except ClientGoneError:
            return
        except (aiohttp.ClientError, OSError, TimeoutError):
            await send_error(send, 503, _BEFORE, CODE)
            return
        try:
            # A server that ends says "not again" of itself; here another one may answer.
            left_out = _NOT_PASSED_BACK | {_NOT_AGAIN} if answer.status == 503 else _NOT_PASSED_BACK
            passed = [pair for pair in answer.raw_headers if pair[0].lower() not in left_out]
            await send({"type": "http.response.start", "status": answer.status, "headers": passed})
            await _send_body(answer, send, is_event_stream(passed))
        finally:
            answer.close()  # one that has been read to its end goes back to the pool; any other ends its request


async def _send_body(answer: aiohttp.ClientResponse, send: Send, is_events: bool) -> None:
    """All of it; of events only whole ones, so that an error event can follow where the server ends."""
    events = WholeEvents()
    cut: Callable[[bytes], bytes] = events.feed if is_events else bytes
    try:
        async for piece in answer.content.iter_any():
            if whole := cut(piece):
                await send({"type": "http.response.body", "body": whole, "more_body": True})
    except (aiohttp.ClientError, OSError):
        if not is_events:
            raise  # the proxy closes the connection: the length that was announced is not reached
        await send({"type": "http.response.body", "body": error_event(_WITHIN, CODE)})
        return
    await send({"type": "http.response.body", "body": events.rest()})


async def _body(receive: Receive) -> bytes | AsyncIterator[bytes] | None:
    """The body of a request: bytes when it came in one piece, None when there is none."""
    first = await receive()
    if first["type"] == "http.disconnect":
        raise ClientGoneError
    if not first.get("more_body"):
        return first.get("body") or None
    return _pieces(first.get("body", b""), receive)


async def _pieces(first: bytes, receive: Receive) -> AsyncIterator[bytes]:
    yield first
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        yield message.get("body", b"")


def target(scope: Scope) -> str:
    """Path and query of a request as the client wrote them, without the prefix of the route."""
    prefix = scope.get("root_path", "")
    raw = scope.get("raw_path")
    path = raw.decode("ascii") if raw is not None else quote(scope["path"])
    query = scope["query_string"].decode("latin-1")
    return path.removeprefix(quote(prefix)) + (f"?{query}" if query else "")


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing is to be done at start and stop."""
    for kind in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{kind}.complete"})
