"""The HTTP/1.1 server: uvicorn without its signal handling, on a socket that is already bound.

The server limits the number of connections and has one timer for all their deadlines. The limits of a single connection
are in `connection.py`.
"""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Generator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from oarlock.server.http.connection import HEAD_TIMEOUT_S, BoundedProtocol, Connections
from oarlock.server.http.listeners import BACKLOG
from oarlock.server.http.memory_release import MemoryRelease
from oarlock.server.http.tls import ServerTls

_MAX_CONNECTIONS = 16_384
_SWEEP_TICKS = 5  # ticks of uvicorn, a tenth of a second each
_RENEWAL_TICKS = 10
_MEMORY_TICKS = 10
_TLS_SHUTDOWN_S = 5.0  # wait for a client that does not close its TLS session


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is already bound. Signals belong to the supervisor."""

    server_state: Connections

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        max_connections: int | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """`tls`: serve HTTPS with this certificate."""
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
        self._tls = tls
        self._memory = MemoryRelease()
        self.server_state = Connections(max_connections or connection_limit())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start like uvicorn, but with a deadline for TLS handshakes: the connection's deadlines begin afterwards."""
        factory = partial(BoundedProtocol, config=self.config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        if self._tls is None:
            server = await loop.create_server(factory, sock=self._listener, backlog=BACKLOG)
        else:
            server = await loop.create_server(
                factory,
                sock=self._listener,
                backlog=BACKLOG,
                ssl=self._tls.context,
                ssl_handshake_timeout=HEAD_TIMEOUT_S,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
            )
        self.servers = [server]
        self.started = True

    def stop_accepting(self) -> None:
        """Leave new connections to other processes that share the listening socket. Continue to serve open ones."""
        for server in self.servers:
            server.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self.server_state.expire(asyncio.get_running_loop().time())
        if self._tls is not None and counter % _RENEWAL_TICKS == 0:
            self._tls.renew()
        if counter % _MEMORY_TICKS == 0:
            self._memory.look()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self._listener])


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, since each connection uses a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else hard
    # some systems allow less than their hard limit; the limit then stays unchanged
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limit() -> int:
    """Return the maximum number of connections. It leaves an eighth of the descriptors, at least 64, for everything
    else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, soft - max(64, soft // 8)))
