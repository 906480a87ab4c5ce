"""Measures a link: round trips of small messages and bytes per second, over TCP.

    python link_probe.py PORT        answers on every address until its standard input ends

The answering side is a process of its own, so that the two do not wait for one interpreter. Knows nothing of hosts:
both sides run wherever they are started.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

PING, TAKE = b"p", b"t"  # the first byte of a connection says what it is for
END_OF_BYTES = b"e"


def connect(address: str, port: int, timeout_s: float = 10.0) -> socket.socket:
    connection = socket.create_connection((address, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def round_trip_s(address: str, port: int, count: int = 200) -> float:
    """The median of the seconds of `count` round trips of one byte, after 20 that do not count."""
    times = []
    with connect(address, port) as connection:
        connection.sendall(PING)
        for number in range(count + 20):
            begun = time.perf_counter()
            connection.sendall(b"x")
            if not connection.recv(1):
                raise ConnectionError("the probe's other side has ended")
            if number >= 20:
                times.append(time.perf_counter() - begun)
    return statistics.median(times)


def bytes_per_s(address: str, port: int, num_bytes: int = 1 << 24) -> float:
    """Bytes per second of one connection, from the first byte sent to the answer that the last one has come."""
    piece = bytes(1 << 16)
    with connect(address, port) as connection:
        connection.sendall(TAKE)
        begun = time.perf_counter()
        for _ in range(num_bytes // len(piece)):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != END_OF_BYTES:
            raise ConnectionError("the probe's other side has ended")
        return num_bytes / (time.perf_counter() - begun)


@contextlib.contextmanager
def answering(port: int) -> Generator[None]:
    """The other side, started on the host that this thread is on. Ends with the block."""
    command = [sys.executable, "-I", str(Path(__file__)), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != b"listening\n":
                raise ConnectionError(f"nothing can listen on port {port}")
            yield
        finally:
            process.stdin.close()


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        ping = connection.recv(1) == PING
        while received := connection.recv(1 << 18):
            if ping:
                connection.sendall(received)
        if not ping:
            connection.sendall(END_OF_BYTES)


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def main() -> None:
    with socket.create_server(("", int(sys.argv[1]))) as listener:
        print("listening", flush=True)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    main()
