"""The listening socket of the HTTP server: a TCP port, a Unix socket, or a socket opened by a service manager.

Light to import, so a command can report that its port is taken before it starts anything.
"""

import errno
import os
import socket
import stat

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import Settings

BACKLOG = 2048
_SOCKET_MODE = 0o666  # any local user may connect, as on loopback; the folder's permissions can restrict that


def listen(settings: Settings) -> socket.socket:
    """Return the listening socket that the settings ask for. Raises `StartupError`."""
    return bind_unix(settings.uds) if settings.uds is not None else bind(settings.host, settings.port)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises `StartupError`, which names the process that uses the port."""
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
    """Return a listening Unix socket, in place of a socket left by an earlier process. Raises `StartupError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_left_behind(path)
        listener.bind(path)
        os.chmod(path, _SOCKET_MODE)
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
    """Remove a socket that no process listens on. Raises `StartupError` for anything else of this name."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{path} exists and is not a socket.", "Move it away, or give --uds an unused path.")
    if not remove_unused(path):
        raise StartupError(
            f"Another process listens on {path}.", "Stop that process, or choose another path: --uds PATH"
        )


def remove_unused(path: str) -> bool:
    """Remove the Unix socket at `path` if no process listens on it. Return whether the path is free now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # if the backlog is full, the call would block: the socket is in use
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
    """Return the listening socket that a service manager has passed as descriptor `first`. `fds`: their number.

    Raises `StartupError`.
    """
    fix = "Give the socket unit exactly one ListenStream=."
    if fds != 1:
        raise StartupError(f"The service manager passes {fds} sockets, but the server listens on one.", fix)
    os.set_inheritable(first, False)
    try:
        listener = socket.socket(fileno=first)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartupError(
            f"Descriptor {first}, passed by the service manager, is not a socket: {error.strerror}.", fix
        ) from None
    if listener.type != socket.SOCK_STREAM or not listens:
        raise StartupError("The socket that the service manager passes is not a listening stream socket.", fix)
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> tuple[str, int] | str:
    """Return (host, port) of a TCP socket, or the path of a Unix socket."""
    name = listener.getsockname()
    return os.fsdecode(name) if listener.family == socket.AF_UNIX else (name[0], name[1])


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of the server on this machine; for a Unix socket, `unix:` and its path."""
    address = address_of(listener)
    if isinstance(address, str):
        return f"unix:{address}"
    host, port = address
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def warn_if_exposed(settings: Settings) -> str | None:
    """Return a warning for the log if the network can use this server without a key."""
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
        return StartupError(f"This user is not allowed to open port {port}.", "Choose a port above 1023: --port 8000")
    if error.errno == errno.EADDRNOTAVAIL:
        return StartupError(f"{host} is not an address of this machine.", "Use 127.0.0.1 or 0.0.0.0.")
    return StartupError(f"Cannot listen on {host} port {port}: {error.strerror}.", "Choose another --host or --port.")


def _process_on(port: int) -> str | None:
    """Return the process that listens on `port`, if this user may see it."""
    import psutil  # only needed to explain a failure

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return None  # the process belongs to another user
    return None
