"""The HTTP/1.1 server: uvicorn without its signal handling, with a limit of connections and one timer for deadlines.

The limits of a single connection are in `http_connection`.
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
    """Raise the soft limit of open files to the hard one: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than their hard limit: it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """The limit of connections. An eighth of the file descriptors, at least 64, is left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, soft - max(64, soft // 8)))


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `StartupError`, which names the process that uses the port."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartupError(
            f"The host {host} cannot be resolved ({error.strerror}).", "Use 127.0.0.1 or 0.0.0.0."
        ) from None
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
        process = _process_on(port)
        return StartupError(
            f"Port {port} on {host} is in use{f' by {process}' if process else ''}.",
            f"Stop that process, or choose another port: --port {port + 1 if port < 65535 else 8000}",
        )
    if error.errno == errno.EACCES:
        return StartupError(f"Port {port} may not be opened by this user.", "Choose a port above 1023: --port 8000")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine.", "Use 127.0.0.1 or 0.0.0.0.")
    return StartupError(f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another --host or --port.")


def _process_on(port: int) -> str | None:
    """The process that listens on `port`, if this user may see it."""
    import psutil  # only needed to explain a failure

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return None  # of another user
    return None


def url_of(listener: socket.socket) -> str:
    """The URL of the server on this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_exposed(host: str, has_keys: bool) -> str | None:
    """A warning for the log when the network can use this server without a key."""
    if is_loopback(host) or has_keys:
        return None
    return f"listening on {host} without --api-key: anyone who can reach this machine can use the model"
