"""The HTTP/1.1 server: the socket that it listens on, and uvicorn without its signal handling.

The socket is a TCP port, a Unix socket, or one that a service manager has opened. The server limits the connections,
and has one timer for their deadlines; the limits of a single connection are in `connection.py`.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Generator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from oarlock.engine.errors import StartupError
from oarlock.server.config.settings import Settings
from oarlock.server.http.connection import HEAD_TIMEOUT_S, BoundedProtocol, Connections
from oarlock.server.http.tls import ServerTls

BACKLOG = 2048
_ANYONE = 0o666  # as on loopback; where fewer may connect, the socket's folder says so
_MAX_CONNECTIONS = 16_384
_SWEEP_TICKS = 5  # of uvicorn's, a tenth of a second each
_RENEWAL_TICKS = 10
_TLS_SHUTDOWN_S = 5.0  # for a client that does not say goodbye


def listen(settings: Settings) -> socket.socket:
    """The listening socket that the settings ask for. Raises `StartupError`."""
    return bind_unix(settings.uds) if settings.uds is not None else bind(settings.host, settings.port)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises `StartupError`, which names the process that uses the port."""
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
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(host, port, error) from None
    listener.setblocking(False)
    return listener


def bind_unix(path: str) -> socket.socket:
    """A listening Unix socket. One that an earlier process has left is replaced. Raises `StartupError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_behind(path)
        listener.bind(path)
        os.chmod(path, _ANYONE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"Cannot listen on the Unix socket {path}: {error.strerror}.",
            "Give --uds a path in an existing folder that this user may write to.",
        ) from None
    except StartupError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _remove_left_behind(path: str) -> None:
    """Remove a socket that nobody listens on. Raises `StartupError` for anything else that has this name."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(
            f"{path} exists and is no socket.", "Move it away, or give --uds a path that nothing has yet."
        )
    if not remove_unused(path):
        raise StartupError(
            f"Another process listens on {path}.", "Stop that process, or choose another path: --uds PATH"
        )


def remove_unused(path: str) -> bool:
    """Remove the Unix socket of this name if nobody listens on it any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # where the backlog is full, it is in use
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False
    return False


def inherited(fds: int, first: int = 3) -> socket.socket:
    """The listening socket that a service manager has handed over as descriptor `first`, the only one of `fds`.

    Raises `StartupError`.
    """
    fix = "Give the socket unit exactly one ListenStream=."
    if fds != 1:
        raise StartupError(f"The service manager hands over {fds} sockets, but the server listens on one.", fix)
    os.set_inheritable(first, False)
    try:
        listener = socket.socket(fileno=first)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartupError(
            f"Descriptor {first}, which the service manager hands over, is no socket: {error.strerror}.", fix
        ) from None
    if listener.type != socket.SOCK_STREAM or not listens:
        raise StartupError("The socket that the service manager hands over does not listen for streams.", fix)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> tuple[str, int] | str:
    """(host, port) of a TCP socket, or the path of a Unix socket."""
    name = listener.getsockname()
    return os.fsdecode(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of the server on this machine; of a Unix socket `unix:` and its path."""
    address = address_of(listener)
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_exposed(settings: Settings) -> str | None:
    """A warning for the log when the network can use this server without a key."""
    if settings.is_local or settings.has_api_keys:
        return None
    return f"listening on {settings.host} without --api-key: anyone who can reach this machine can use the model"


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
        """`tls`: HTTPS is served, with its certificate."""
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
        self.server_state = Connections(max_connections or connection_limit())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that a handshake has a deadline, too: only then the connection has its own."""
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
        """Leave new connections to other processes that have the listening socket. Open ones are served on."""
        for server in self.servers:
            server.close()

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self.server_state.expire(asyncio.get_running_loop().time())
        if self._tls is not None and counter % _RENEWAL_TICKS == 0:
            self._tls.renew()
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
