"""A proxy for programs that must talk to one server only: it records and refuses every other address."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

_HEAD_BYTES = 65_536


class Elsewhere:
    """The proxy, on a free port of 127.0.0.1. `asked`: the addresses other than the server's that were asked for."""

    def __init__(self, port: int) -> None:
        """`port`: the server's, on 127.0.0.1; some programs send even those requests through a proxy."""
        self.asked: list[str] = []
        self._allowed = f"127.0.0.1:{port}"
        self._server = _Server(self._handle)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Elsewhere:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that send a program's requests through this proxy, except those to this machine."""
        proxy = f"http://127.0.0.1:{self._server.server_address[1]}"
        named = {f"{name}_proxy": proxy for name in ("http", "https", "all")} | {"no_proxy": "127.0.0.1"}
        return named | {name.upper(): value for name, value in named.items()}

    def _handle(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            received = connection.recv(4096)
            if not received:
                return
            head += received
        method, target = head.decode("latin-1").split(" ")[:2]
        if method == "CONNECT" and target == self._allowed:
            _tunnel(connection, target)
        else:
            self.asked.append(f"{method} {target}")
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self._handle = handle

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Call the handler with the connection itself."""
        with contextlib.suppress(OSError):  # the program may leave at any time
            self._handle(request)


def _tunnel(connection: socket.socket, target: str) -> None:
    host, port = target.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as server:
        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        back = threading.Thread(target=_copy, args=(server, connection), daemon=True)
        back.start()
        _copy(connection, server)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(65_536):
            sink.sendall(received)
        sink.shutdown(socket.SHUT_WR)
