"""Sends bodies that take long to read to a process of their own, so that other requests do not wait for them.

The process is started with the first such body, and started again after it was lost. One body is read at a time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from oarlock.engine.errors import RequestError
from oarlock.engine.python_child import start_python
from oarlock.server.endpoints.batches.schema import BatchRequest, WrongBatchError, read_line
from oarlock.server.http.large_body.detached import attach, value_of
from oarlock.server.observability.logs import event, logger
from oarlock.server.strict_model import StrictModel

READ_TIMEOUT_S = 60.0  # for one body; 16 MiB of texts or ids take about a second
_SMALL = 64 * 1024  # bytes: never sent to the process
_AT_ONCE_MS = 15.0  # what the event loop may spend on one body
_MS_PER_BYTE = 8e-6
_MS_PER_ITEM = 5e-4
_ResultT = TypeVar("_ResultT")
_log = logger("bodies")


def takes_long(body: bytes) -> bool:
    """Whether reading it would block the event loop; commas and brackets bound the number of values in it."""
    if len(body) <= _SMALL:
        return False
    left_ms = _AT_ONCE_MS - len(body) * _MS_PER_BYTE
    return left_ms < 0 or sum(map(body.count, (b",", b"[", b"{"))) * _MS_PER_ITEM > left_ms


class _ProcessLostError(Exception):
    """The process has ended in the middle of a body."""


class LargeBodies:
    """The process, and the one thread that communicates with it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "large-bodies")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reading: object = None

    async def read(self, schemas: Sequence[type[StrictModel]], body: bytes, is_strict: bool) -> tuple[Any, list[str]]:
        """Return what `parse_any` and `unknown_parameters` do. Raises `RequestError`. Cancelling it ends the work."""
        work, bodies = object(), [body]
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._read_body, work, schemas, bodies, is_strict)
        except asyncio.CancelledError:
            bodies.clear()  # the pool keeps what it is called with until its turn comes
            with self._lock:
                if self._reading is work:
                    self._stop()
            raise

    def read_line(self, line: bytes, number: int, name: str) -> BatchRequest:
        """Reads a line as `request_line.read_line` does, a long one in the process. Blocks: for threads."""
        if not takes_long(line):
            return read_line(line, number, name)
        try:
            return self._pool.submit(self._read_line, line, number, name).result()
        except RequestError as error:
            cause = f"Line {number} of {name} cannot be read: {error.message}"
            fix = "Divide it into several requests."
            raise WrongBatchError(cause, fix, number, "line_too_complex") from None

    def close(self) -> None:
        """End the process. The next body would start it again."""
        with self._lock:
            self._stop()

    def _read_body(
        self, work: object, schemas: Sequence[type[StrictModel]], bodies: list[bytes], is_strict: bool
    ) -> tuple[Any, list[str]]:
        """`bodies`: the one body."""

        def received(sock: socket.socket, answer: dict[str, Any]) -> tuple[bytes, list[tuple[Any, str, memoryview]]]:
            rest = bytes(_exactly(sock, answer["rest"]))
            return rest, [(path, kind, _exactly(sock, size)) for path, kind, size in answer["leaves"]]

        header = {"schemas": [schema.__name__ for schema in schemas], "strict": is_strict}
        answer, (rest, long) = self._exchange(work, header, bodies.pop(), received)
        schema = next(schema for schema in schemas if schema.__name__ == answer["schema"])
        parsed = schema.model_validate_json(rest)
        for path, kind, data in long:
            attach(parsed, path, value_of(kind, data))
        return parsed, answer["unknown"]

    def _read_line(self, line: bytes, number: int, name: str) -> BatchRequest:
        def received(sock: socket.socket, answer: dict[str, Any]) -> bytes:
            return bytes(_exactly(sock, answer["body"]))

        answer, body = self._exchange(object(), {"line": number, "name": name}, line, received)
        return BatchRequest(answer["custom_id"], answer["url"], body)

    def _exchange(
        self,
        work: object,
        header: Mapping[str, Any],
        content: bytes,
        received: Callable[[socket.socket, dict[str, Any]], _ResultT],
    ) -> tuple[dict[str, Any], _ResultT]:
        """Send `content`; the answer, and what `received` reads behind it. Raises `RequestError`, `WrongBatchError`."""
        with self._lock:
            if self._socket is None:
                self._start()
            sock, self._reading = self._socket, work
        assert sock is not None
        try:
            sock.sendall(json.dumps({**header, "size": len(content)}).encode() + b"\n")
            sock.sendall(content)
            answer = json.loads(_line(sock))
            if "problem" in answer:
                raise RequestError(answer["problem"], answer.get("param"), answer.get("code"))
            if "wrong" in answer:
                raise WrongBatchError(*answer["wrong"])
            return answer, received(sock, answer)
        except (OSError, _ProcessLostError) as error:
            with self._lock:
                if self._socket is sock:  # else it was stopped here, because this body was cancelled
                    self._stop()
                    _log.warning(event("body_process_lost", cause=type(error).__name__, bytes=len(content)))
            reason = "takes too long" if isinstance(error, TimeoutError) else "takes too much memory"
            raise RequestError(f"The body {reason} to read: it has too many fields, objects or lists.") from None
        finally:
            self._reading = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = start_python(
                ["-m", "oarlock.server.http.large_body.process", "--fd", str(fd)], pass_fds=(fd,)
            )
        ours.settimeout(READ_TIMEOUT_S)
        self._socket = ours
        _log.info(event("body_process_started", pid=self._process.pid))

    def _stop(self) -> None:
        sock, self._socket = self._socket, None
        process, self._process = self._process, None
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
            sock.close()
        if process is not None:
            process.kill()
            process.wait()


def _line(sock: socket.socket) -> bytes:
    """Bytes up to the end of the line and no further: peeked at before they are consumed."""
    parts: list[bytes] = []
    while seen := sock.recv(1 << 16, socket.MSG_PEEK):
        end = seen.find(b"\n")
        parts.append(sock.recv(len(seen) if end < 0 else end + 1))
        if end >= 0:
            return b"".join(parts)
    raise _ProcessLostError


def _exactly(sock: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    filled = 0
    while filled < size:
        count = sock.recv_into(data[filled:], min(size - filled, 1 << 20))
        if not count:
            raise _ProcessLostError
        filled += count
    return data
