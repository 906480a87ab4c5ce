"""Reads bodies that take long in a process of their own, so that other requests do not wait for them.

Parsing JSON holds the GIL. `python -m oarlock.server.http.large_body --fd N` is that process: it is started with the
first such body, and again after it was lost, and reads one body at a time. It returns an error, or the checked body in
a small form: unknown fields left out, long texts and lists of ids as plain bytes behind it, which become Python objects
many times faster than JSON does. Of a line of a batch it returns the members, and the text of its body, which is sent
again to be read. The time and memory that a body takes do not affect the server. The end of the socket ends the
process.
"""

import argparse
import asyncio
import codecs
import gc
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from oarlock.engine.errors import RequestError
from oarlock.engine.python_child import start_python
from oarlock.server.endpoints.batches.schema import BatchRequest, WrongBatchError, read_line
from oarlock.server.http.request_body import REQUEST_BODIES, ignored_parameters, parse_any
from oarlock.server.observability.logs import event, logger
from oarlock.server.strict_model import StrictModel

READ_TIMEOUT_S = 60.0  # for one body; 16 MiB of texts or ids take about a second
_SMALL = 64 * 1024  # bytes: never sent to the process
_AT_ONCE_MS = 15.0  # what the event loop may spend on one body
_MS_PER_BYTE = 8e-6
_MS_PER_ITEM = 5e-4
_ResultT = TypeVar("_ResultT")
_log = logger("bodies")

MAX_REST_BYTES = 2**20  # of a body without its long texts and ids: the server parses that at once
_MAX_NAME = 65  # characters of an ignored name; longer ones are never repeated
_NICENESS = 5  # the server's own work has priority
_MIN_MEMORY_BYTES = 2 << 30
_MEMORY_PER_BYTE = 128  # what `[[],[],…` becomes, twice

# Fields that may hold long texts, and those that may hold long lists of ids.
_TEXTS = frozenset({"prompt", "suffix", "content", "text", "refusal", "reasoning", "reasoning_content", "arguments"})
_TEXTS |= {"input", "instructions", "output", "encrypted_content", "query", "documents", "text_1", "text_2"}
_IDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids", "stop_token_ids"})
_MIN_CHARACTERS = 128
_MIN_IDS = 32
_DECODED_AT_ONCE = 2**20  # bytes

Place = list[str | int]  # of a value in a body


def takes_long(body: bytes) -> bool:
    """Whether reading it would block the event loop; commas and brackets bound the number of values in it."""
    if len(body) <= _SMALL:
        return False
    left_ms = _AT_ONCE_MS - len(body) * _MS_PER_BYTE
    return left_ms < 0 or sum(map(body.count, (b",", b"[", b"{"))) * _MS_PER_ITEM > left_ms


class _ProcessLostError(Exception):
    """The process has ended in the middle of a body."""


class LargeBodies:
    """The process that reads large bodies, and the one thread that communicates with it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "large-bodies")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reading: object = None

    async def read(self, schemas: Sequence[type[StrictModel]], body: bytes, is_strict: bool) -> tuple[Any, list[str]]:
        """Return the results of `parse_any` and `ignored_parameters`. Cancelling it ends the work.

        Raises `RequestError`.
        """
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
        """Reads a line as `read_line` of the batches' schema does, a long one in the process. Blocks: for threads."""
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
        return parsed, answer["ignored"]

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
            self._process = start_python(["-m", "oarlock.server.http.large_body", "--fd", str(fd)], pass_fds=(fd,))
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


def main(argv: Sequence[str]) -> int:
    """Read bodies from the socket `--fd` until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which may be sent to all processes at once; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="oarlock.server.http.large_body")
    parser.add_argument("--fd", type=int, required=True)
    os.nice(_NICENESS)
    gc.disable()  # a body has no cycles, and looking for them takes longer than parsing
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock, sock.makefile("rwb") as stream:
        while line := stream.readline():
            header = json.loads(line)
            _limit_memory(header["size"])
            body = stream.read(header["size"])
            try:
                if "line" in header:
                    _read_line(stream, body, header["line"], header["name"])
                else:
                    _read(stream, [REQUEST_BODIES[name] for name in header["schemas"]], body, header["strict"])
            except RequestError as error:
                _send(stream, problem=error.message, param=error.param, code=error.code)
            except WrongBatchError as error:
                _send(stream, wrong=[error.cause, error.fix, error.line, error.code])
            except MemoryError:
                _send(stream, problem="The body has more objects and lists than this server reads.")
            stream.flush()
            gc.collect()
    return 0


def _read(stream: io.BufferedIOBase, schemas: list[type[StrictModel]], body: bytes, is_strict: bool) -> None:
    """Parse one body and send the result. Raises `RequestError`."""
    parsed = parse_any(schemas, body)
    ignored = ignored_parameters(parsed, is_strict)
    schema = type(parsed)
    value: dict[str, Any] = {name: item for name, item in from_json(body).items() if name in schema.model_fields}
    leaves: list[Leaf] = detach(value, parsed)
    rest = json.dumps(value, ensure_ascii=False).encode()
    if len(rest) > MAX_REST_BYTES:
        raise RequestError(
            f"Without its texts and token ids the body has {len(rest)} bytes, at most {MAX_REST_BYTES} are read. "
            "Send fewer messages, parts or tools."
        )
    described = [leaf.described() for leaf in leaves]
    names = [name[:_MAX_NAME] for name in ignored]
    _send(stream, schema=schema.__name__, ignored=names, rest=len(rest), leaves=described)
    stream.write(rest)
    for leaf in leaves:
        stream.write(leaf.data)


def _read_line(stream: io.BufferedIOBase, line: bytes, number: int, name: str) -> None:
    """Parse one line of a batch and send the result. Raises `WrongBatchError`."""
    request = read_line(line, number, name)
    _send(stream, custom_id=request.custom_id, url=request.url, body=len(request.body))
    stream.write(request.body)


def _send(stream: io.BufferedIOBase, **message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")


def _limit_memory(size: int) -> None:
    if sys.platform != "linux":
        return
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = taken + max(_MIN_MEMORY_BYTES, size * _MEMORY_PER_BYTE)
    resource.setrlimit(resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


@dataclass(frozen=True, slots=True)
class Leaf:
    """One long value: its place in the body, and its bytes (UTF-8, or int32 in the machine's byte order)."""

    path: Place
    kind: str  # "text" or "ids"
    data: bytes

    def described(self) -> tuple[Place, str, int]:
        """All but the bytes: path, kind, and their number."""
        return self.path, self.kind, len(self.data)


def detach(value: dict[str, Any], parsed: StrictModel) -> list[Leaf]:
    """Take the long values out of the JSON of a checked body; a short one of the same kind replaces each."""
    return list(_of_fields(value, parsed, []))


def _of_fields(value: dict[str, Any], parsed: StrictModel, path: Place) -> Iterator[Leaf]:
    for name in value.keys() & type(parsed).model_fields.keys():  # what is not declared stays where it is
        yield from _detached(value, name, getattr(parsed, name), [*path, name], name)


def _detached(container: Any, key: str | int, parsed: Any, path: Place, field: str) -> Iterator[Leaf]:
    """Take the long values out of `container[key]`, which became `parsed`."""
    value = container[key]
    if isinstance(parsed, str):
        if field in _TEXTS and len(parsed) >= _MIN_CHARACTERS:
            container[key] = "x"
            yield Leaf(path, "text", parsed.encode())
    elif isinstance(parsed, list) and len(parsed) >= _MIN_IDS and isinstance(parsed[0], int):
        if field in _IDS:
            container[key] = parsed[:1]
            yield Leaf(path, "ids", array("i", parsed).tobytes())
    elif isinstance(parsed, list):
        for index, item in enumerate(parsed):
            yield from _detached(value, index, item, [*path, index], field)
    elif isinstance(parsed, StrictModel):
        yield from _of_fields(value, parsed, path)


def attach(parsed: Any, path: Place, value: str | list[int]) -> None:
    """Put one back where it was."""
    for key in path[:-1]:
        parsed = parsed[key] if isinstance(key, int) else getattr(parsed, key)
    if isinstance(path[-1], int):
        parsed[path[-1]] = value
    else:
        setattr(parsed, path[-1], value)


def value_of(kind: str, data: memoryview) -> str | list[int]:
    """The value of a `Leaf`, made without holding the GIL for long."""
    if kind == "text":
        decode = codecs.getincrementaldecoder("utf-8")().decode
        return "".join(
            decode(data[start : start + _DECODED_AT_ONCE]) for start in range(0, len(data), _DECODED_AT_ONCE)
        )
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
