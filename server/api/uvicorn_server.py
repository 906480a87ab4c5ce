"""The HTTP/1.1 server: uvicorn with its signal handling removed, a limit of connections, and one clock for them all.

What a single connection may do is in `http_connection`. Knows sockets and descriptors, not routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from engine.errors import StartupError
from server.api.http_connection import BoundedProtocol, Connections
from server.config.allowed_hosts import is_loopback

_MAX_CONNECTIONS = 16_384
_SWEEP_TICKS = 5  # of uvicorn's, a tenth of a second each


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound. Signals belong to the supervisor."""

    server_state: Connections

    def __init__(self, app: ASGIApp, listener: socket.socket, max_connections: int | None = None) -> None:
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
                timeout_graceful_shutdown=2,
                reset_contextvars=True,
            )
        )
        self._listener = listener
        self.server_state = Connections(max_connections or connection_limit())

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self.server_state.expire(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])


def raise_descriptor_limit() -> None:
    """As many open files as this process may have without asking anyone: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say: it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """How many connections there may be: an eighth of the descriptors, 64 at least, is left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, soft - max(64, soft // 8)))


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
