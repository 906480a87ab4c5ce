"""The HTTP/1.1 server: uvicorn with its signal handling removed and with limits it lacks.

Connections that never complete a request head are closed; heads are bounded; refusals of the parser have our error
shape; what a dead reader left in a buffer is dropped. Knows sockets and bytes, not routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.errors import StartupError
from server.errors import HttpError, error_bytes
from server.guard import is_loopback

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 32 * 1024
MAX_HEAD_FIELDS = 100
_KEEP_ALIVE_S = 65  # above the usual 60 s of proxies, so that they and not we close idle connections
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with a deadline and a size for every request head."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or not self._in_head:
            return
        self._head_bytes = max(self._head_bytes, 1)  # the head may have begun behind another request
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"The request head is larger than {MAX_HEAD_BYTES} bytes.")
        elif self._head_timer is None:  # the next request on this connection has begun
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        # For the stream that finds its reader gone: only the transport can drop what is already buffered.
        self.scope["state"]["abort_connection"] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEAD_FIELDS:
            raise ValueError("too many header fields")  # the parser turns it into its own error

    def on_headers_complete(self) -> None:
        self._head_done()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._in_head and len(self.headers) > MAX_HEAD_FIELDS:
            self._refuse(431, f"The request head has more than {MAX_HEAD_FIELDS} fields.")
            return
        self._refuse(400, msg)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _head_done(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_answering:  # a head sent ahead of its turn may wait as long as the answer before it takes
            self._expect_head()
        elif not self._head_bytes:  # opened ahead of need and never used: nobody waits for an answer
            self.transport.close()
        else:
            self._refuse(408, f"No complete request head arrived within {HEAD_TIMEOUT_S:.0f} seconds.")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        if self._is_answering:  # a refusal written now would land in the middle of another answer
            self.transport.close()
            return
        body = error_bytes(HttpError(status, message))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self._head_done()
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound. Signals belong to the supervisor."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
                reset_contextvars=True,
            )
        )
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, before anything slow begins. Raises `StartupError` that names the holder of the port."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(f"The host {host} is not known ({error.strerror}).", "Use 127.0.0.1 or 0.0.0.0.") from None
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    listener.setblocking(False)
    return listener


def _bind_error(host: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        holder = _holder_of(port)
        return StartupError(
            f"Port {port} on {host} is in use{f' by {holder}' if holder else ''}.",
            f"Stop that process, or choose another port: --port {port + 1 if port < 65535 else 8000}",
        )
    if error.errno == errno.EACCES:
        return StartupError(f"Port {port} may not be opened by this user.", "Choose a port above 1023: --port 8000")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine.", "Use 127.0.0.1 or 0.0.0.0.")
    return StartupError(f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another --host or --port.")


def _holder_of(port: int) -> str | None:
    """The process that listens on `port`, if we may see it."""
    import psutil  # only needed to explain a failure

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return None  # not ours to see: the message does without the name
    return None


def url_of(listener: socket.socket) -> str:
    """An address that a person on this machine can open."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_exposed(host: str, has_keys: bool) -> str | None:
    """A sentence for the log when strangers could use this server."""
    if is_loopback(host) or has_keys:
        return None
    return f"listening on {host} without --api-key: everyone who can reach this machine can use the model"
