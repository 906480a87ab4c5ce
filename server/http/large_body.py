"""A separate process that reads expensive bodies, so that other requests do not wait for them.

Parsing JSON holds the GIL. `python -m oarlock.server.http.large_body --fd N` is the process. It is started for the
first such body and again after a loss, and reads one body at a time. It returns an error, or the checked body in a
compact format: unknown fields are left out, and long strings and lists of ids follow as plain bytes, which become
Python objects many times faster than JSON does. For a line of a batch file it returns the members and the text of the
line's body, which is sent again later to be parsed. The time and memory that a body takes do not affect the server. The
process ends when its socket is closed.
"""

import argparse
import asyncio
import codecs
import contextlib
import gc
import io
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil
from pydantic_core import from_json

from oarlock.base.process_memory import limit_mapped_bytes, memory_use
from oarlock.base.python_child import start_python
from oarlock.engine.errors import RequestError, UnavailableError
from oarlock.server.http.body_cost import BYTES_PER_VALUE, cost_of, exact_cost_of, largest_member, takes_long
from oarlock.server.http.request_body import REQUEST_BODIES, ignored_parameters, parse_any
from oarlock.server.observability.logs import event, logger
from oarlock.server.schemas.batches import BatchRequest, WrongBatchError, read_line
from oarlock.server.schemas.strict_model import StrictModel

READ_TIMEOUT_S = 60.0  # limit for one body; 16 MiB of strings or ids take about a second
STALL_TIMEOUT_S = 5.0  # longest time without CPU use; then the process was stopped, or hangs
CPU_LIMIT_S = 20  # CPU time for one body
_CHECK_INTERVAL_S = 1.0  # interval of the checks of a process that does not respond
_END_S = 5.0  # wait for the exit of a process that has closed its socket
_ATTEMPTS = 2
_SENT_AT_ONCE = 1 << 20  # bytes
_LOST = "body_process_lost"  # error code
# Exit status of the process -> fault of the body: the time limit, and libraries that are out of memory. After any other
# end the body is not at fault.
_REASONS = {-signal.SIGXCPU: "takes too long", -signal.SIGABRT: "takes too much memory"}
_ResultT = TypeVar("_ResultT")
_log = logger("bodies")

MAX_REST_BYTES = 2**20  # JSON of a body without its long strings and ids; the server parses it at once
_MAX_NAME = 65  # characters of an ignored name; longer names are never repeated
_NICENESS = 5  # the server's own work has priority
MAX_OBJECT_BYTES = 64 << 20  # estimated size of the lists, numbers and objects of a body
_MEMORY_BYTES = 256 << 20  # three times MAX_OBJECT_BYTES, and libraries
_MEMORY_PER_BYTE = 16  # allowed per byte of the body: its strings exist several times, as bytes and as wide characters

# Fields that may hold long strings (`_TEXTS`) and long lists of ids (`_IDS`).
_TEXTS = frozenset({"prompt", "suffix", "content", "text", "refusal", "reasoning", "reasoning_content", "arguments"})
_TEXTS |= {"input", "instructions", "output", "encrypted_content", "query", "documents", "text_1", "text_2"}
_IDS = frozenset({"prompt", "input", "tokens", "allowed_token_ids", "stop_token_ids"})
_MIN_CHARACTERS = 128
_MIN_IDS = 32
_DECODED_AT_ONCE = 2**20  # bytes

ValuePath = list[str | int]  # path of a value in a body


class _ProcessLostError(Exception):
    """The process has ended, or hangs in the middle of a body."""


class LargeBodies:
    """The process that reads large bodies, and the one thread that communicates with it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "large-bodies")
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._reading: object = None

    @property
    def pid(self) -> int | None:
        """Id of the process, or None if it was not started or was lost."""
        link = self._link
        return None if link is None else link.process.pid

    async def read(
        self, schemas: Sequence[type[StrictModel]], body: bytes | bytearray, is_strict: bool
    ) -> tuple[Any, list[str], int]:
        """Return the results of `parse_any` and `ignored_parameters`, and the approximate size in bytes of the former.

        Cancellation ends the work.

        Raises `RequestError`, and `UnavailableError` if the process is lost twice.
        """
        work, bodies = object(), [body]
        del body  # the thread has the only reference, and drops it as soon as the process has responded
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, self._read_body, work, schemas, bodies, is_strict)
        except asyncio.CancelledError:
            bodies.clear()  # the pool keeps the arguments of a call until its turn comes
            with self._lock:
                if self._reading is work:
                    self._stop()
            raise

    def read_line(self, line: bytes, number: int, name: str) -> BatchRequest:
        """Read a line like `read_line` of the batches' schema, a long line in the process. For threads: it blocks."""
        if not takes_long(line):
            return read_line(line, number, name)
        try:
            return self._pool.submit(self._read_line, line, number, name).result()
        except RequestError as error:
            cause = f"Line {number} of {name} cannot be read: {error.message}"
            fix = "Split it into several requests."
            raise WrongBatchError(cause, fix, number, "line_too_complex") from None

    def close(self) -> None:
        """End the process. The next body would start it again."""
        with self._lock:
            self._stop()

    def _read_body(
        self, work: object, schemas: Sequence[type[StrictModel]], bodies: list[bytes | bytearray], is_strict: bool
    ) -> tuple[Any, list[str], int]:
        """Do the work of `read` in the thread. `bodies`: a list with the one body."""

        def received(link: _Link, reply: dict[str, Any]) -> tuple[bytes, list[tuple[Any, str, memoryview]]]:
            rest = bytes(link.exactly(reply["rest"]))
            return rest, [(path, kind, link.exactly(size)) for path, kind, size in reply["leaves"]]

        header = {"schemas": [schema.__name__ for schema in schemas], "strict": is_strict}
        reply, (rest, long) = self._exchange(work, header, bodies, received)
        schema = next(schema for schema in schemas if schema.__name__ == reply["schema"])
        parsed = schema.model_validate_json(rest)
        num_bytes = len(rest) + cost_of(rest).num_bytes
        while long:
            path, kind, data = long.pop()
            value = value_of(kind, data)
            num_bytes += sys.getsizeof(value) if isinstance(value, str) else BYTES_PER_VALUE * len(value)
            attach(parsed, path, value)
        return parsed, reply["ignored"], num_bytes

    def _read_line(self, line: bytes, number: int, name: str) -> BatchRequest:
        def received(link: _Link, reply: dict[str, Any]) -> bytes:
            return bytes(link.exactly(reply["body"]))

        reply, body = self._exchange(object(), {"line": number, "name": name}, [line], received)
        return BatchRequest(reply["custom_id"], reply["url"], body)

    def _exchange(
        self,
        work: object,
        header: Mapping[str, Any],
        bodies: list[bytes | bytearray],
        received: Callable[["_Link", dict[str, Any]], _ResultT],
    ) -> tuple[dict[str, Any], _ResultT]:
        """Send the body. Return the response and the result of `received`, which reads the bytes that follow the
        response.

        A process that is lost through no fault of the body is started again and receives the body a second time. Raises
        `RequestError`, `WrongBatchError`, and `UnavailableError` if the process is lost twice.
        """
        content = bodies.pop()
        for _ in range(_ATTEMPTS):
            with self._lock:
                if self._link is None:
                    self._link = _Link.start()
                link, self._reading = self._link, work
            try:
                link.begin()
                link.send(json.dumps({**header, "size": len(content)}).encode() + b"\n")
                link.send(content)
                reply = json.loads(link.line())
                if "problem" in reply:
                    raise RequestError(reply["problem"], reply.get("param"), reply.get("code"))
                if "wrong" in reply:
                    raise WrongBatchError(*reply["wrong"])
                return reply, received(link, reply)
            except (OSError, _ProcessLostError) as error:
                self._lost(link, error, len(content))
            finally:
                self._reading = None
        raise UnavailableError("The process that reads large bodies crashed twice. Retry in a moment.", _LOST)

    def _lost(self, link: "_Link", error: Exception, num_bytes: int) -> None:
        """Stop a process that does not respond. Raises `RequestError` if its body is the cause or no longer wanted."""
        with self._lock:
            if self._link is not link:  # it was stopped here because the client of this body left
                raise RequestError("The client disconnected.")
            self._link = None
        status = link.stop()
        _log.warning(
            event("body_process_lost", cause=str(error) or type(error).__name__, status=status, bytes=num_bytes)
        )
        if status in _REASONS:
            reason = _REASONS[status]
            raise RequestError(f"Parsing the body {reason}: it has too many fields, objects or lists.") from None

    def _stop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.stop()


class _Link:
    """One process and the socket to it. A process that hangs or takes too long counts as lost."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        sock.settimeout(_CHECK_INTERVAL_S)
        self.process = process
        self._socket = sock
        self._begun_s = self._moved_s = 0.0
        self._used_s = 0.0  # CPU time of the process when it last made progress

    @staticmethod
    def start() -> "_Link":
        """Start a process. Raises `UnavailableError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            try:
                process = start_python(["-m", "oarlock.server.http.large_body", "--fd", str(fd)], pass_fds=(fd,))
            except OSError as error:  # the system has no more processes or no memory
                ours.close()
                message = (
                    f"The process that reads large bodies cannot be started ({error.strerror}). Retry in a moment."
                )
                raise UnavailableError(message, _LOST) from None
        _log.info(event("body_process_started", pid=process.pid))
        return _Link(process, ours)

    def stop(self) -> int:
        """End the process. Return its exit status, from before the kill if it had already ended."""
        with contextlib.suppress(OSError):  # the other side is closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        self._socket.close()
        status = self.process.poll()
        self.process.kill()
        return self.process.wait() if status is None else status

    def begin(self) -> None:
        """Start the time limit of the next body."""
        self._begun_s = self._moved_s = time.monotonic()

    def send(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._patiently(partial(self._socket.send, rest[:_SENT_AT_ONCE])) :]

    def line(self) -> bytes:
        """Return the bytes up to the end of the line. Peeks first, so that no later byte is consumed."""
        parts: list[bytes] = []
        while seen := self._patiently(partial(self._socket.recv, 1 << 16, socket.MSG_PEEK)):
            end = seen.find(b"\n")
            parts.append(self._socket.recv(len(seen) if end < 0 else end + 1))
            if end >= 0:
                return b"".join(parts)
        raise self._ended()

    def exactly(self, size: int) -> memoryview:
        data = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            part = data[filled : filled + _SENT_AT_ONCE]
            count = self._patiently(partial(self._socket.recv_into, part))
            if not count:
                raise self._ended()
            filled += count
        return data

    def _patiently(self, call: Callable[[], _ResultT]) -> _ResultT:
        """Call `call` until it succeeds, while the process makes progress. Raises `_ProcessLostError`."""
        while True:
            try:
                return call()
            except TimeoutError:
                self._check_moving()

    def _check_moving(self) -> None:
        now = time.monotonic()
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            raise _ProcessLostError("it has ended") from None
        if (used := times.user + times.system) > self._used_s:
            self._used_s, self._moved_s = used, now
        if now - self._moved_s > STALL_TIMEOUT_S:
            raise _ProcessLostError(f"it has not made progress for {STALL_TIMEOUT_S:.0f} s")
        if now - self._begun_s > READ_TIMEOUT_S:
            raise _ProcessLostError(f"it has not responded for {READ_TIMEOUT_S:.0f} s")

    def _ended(self) -> "_ProcessLostError":
        """Return the error for a closed socket. Waits for the process, so that its exit status is known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        return _ProcessLostError("it has ended")


def main(argv: Sequence[str]) -> int:
    """Read bodies from the socket `--fd` until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these may be sent to all processes at once; the parent decides
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="oarlock.server.http.large_body")
    parser.add_argument("--fd", type=int, required=True)
    os.nice(_NICENESS)
    gc.disable()  # a body has no cycles, and searching for them takes longer than parsing
    with socket.socket(fileno=parser.parse_args(argv).fd) as sock, sock.makefile("rwb") as stream:
        while line := stream.readline():
            header = json.loads(line)
            limit_mapped_bytes(memory_use().mapped + _MEMORY_BYTES + header["size"] * _MEMORY_PER_BYTE)
            _limit_time()
            body = stream.read(header["size"])
            try:
                _check_values(body)
                if "line" in header:
                    _read_line(stream, body, header["line"], header["name"])
                else:
                    _read(stream, [REQUEST_BODIES[name] for name in header["schemas"]], body, header["strict"])
            except RequestError as error:
                _send(stream, problem=error.message, param=error.param, code=error.code)
            except WrongBatchError as error:
                _send(stream, wrong=[error.cause, error.fix, error.line, error.code])
            except MemoryError:
                _send(stream, problem="The body has more objects and lists than the server accepts.")
            stream.flush()
            gc.collect()
    return 0


def _check_values(body: bytes) -> None:
    """Raise `RequestError` for a body that would take too much memory."""
    if exact_cost_of(body).num_bytes > MAX_OBJECT_BYTES:
        name = largest_member(body)
        subject = f"'{name}'" if name else "The body"
        raise RequestError(
            f"{subject} has too many objects, lists and values: they would take more than "
            f"{MAX_OBJECT_BYTES >> 20} MiB of memory. Send fewer.",
            name,
        )


def _read(stream: io.BufferedIOBase, schemas: list[type[StrictModel]], body: bytes, is_strict: bool) -> None:
    """Parse one body and send the result. Raises `RequestError`."""
    parsed = parse_any(schemas, body)
    ignored = ignored_parameters(parsed, is_strict)
    schema = type(parsed)
    value: dict[str, Any] = {name: item for name, item in from_json(body).items() if name in schema.model_fields}
    leaves: list[LongValue] = detach(value, parsed)
    rest = json.dumps(value, ensure_ascii=False).encode()
    if len(rest) > MAX_REST_BYTES:
        raise RequestError(
            f"Besides its text and token ids, the body has {len(rest)} bytes; at most {MAX_REST_BYTES} are "
            "accepted. Send fewer messages, parts or tools."
        )
    described = [leaf.described() for leaf in leaves]
    names = [name[:_MAX_NAME] for name in ignored]
    _send(stream, schema=schema.__name__, ignored=names, rest=len(rest), leaves=described)
    stream.write(rest)
    for leaf in leaves:
        stream.write(leaf.data)


def _read_line(stream: io.BufferedIOBase, line: bytes, number: int, name: str) -> None:
    """Parse one line of a batch file and send the result. Raises `WrongBatchError`."""
    request = read_line(line, number, name)
    _send(stream, custom_id=request.custom_id, url=request.url, body=len(request.body))
    stream.write(request.body)


def _send(stream: io.BufferedIOBase, **message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")


def _limit_time() -> None:
    """Make SIGXCPU end this process if the next body takes too long."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = math.ceil(time.process_time()) + CPU_LIMIT_S
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


@dataclass(frozen=True, slots=True)
class LongValue:
    """One long value: its path in the body, and its bytes (UTF-8, or int32 in the machine's byte order)."""

    path: ValuePath
    kind: str  # "text" or "ids"
    data: bytes

    def described(self) -> tuple[ValuePath, str, int]:
        """Return path, kind and number of bytes."""
        return self.path, self.kind, len(self.data)


def detach(value: dict[str, Any], parsed: StrictModel) -> list[LongValue]:
    """Take the long values out of the JSON of a checked body. A short value of the same kind replaces each."""
    return list(_of_fields(value, parsed, []))


def _of_fields(value: dict[str, Any], parsed: StrictModel, path: ValuePath) -> Iterator[LongValue]:
    for name in value.keys() & type(parsed).model_fields.keys():  # undeclared fields stay in the JSON
        yield from _detached(value, name, getattr(parsed, name), [*path, name], name)


def _detached(container: Any, key: str | int, parsed: Any, path: ValuePath, field: str) -> Iterator[LongValue]:
    """Take the long values out of `container[key]`, whose checked value is `parsed`."""
    value = container[key]
    if isinstance(parsed, str):
        if field in _TEXTS and len(parsed) >= _MIN_CHARACTERS:
            container[key] = "x"
            yield LongValue(path, "text", parsed.encode())
    elif isinstance(parsed, list) and len(parsed) >= _MIN_IDS and isinstance(parsed[0], int):
        if field in _IDS:
            container[key] = parsed[:1]
            yield LongValue(path, "ids", array("i", parsed).tobytes())
    elif isinstance(parsed, list):
        for index, item in enumerate(parsed):
            yield from _detached(value, index, item, [*path, index], field)
    elif isinstance(parsed, StrictModel):
        yield from _of_fields(value, parsed, path)


def attach(parsed: Any, path: ValuePath, value: str | list[int]) -> None:
    """Put the long value back at its path."""
    for key in path[:-1]:
        parsed = parsed[key] if isinstance(key, int) else getattr(parsed, key)
    if isinstance(path[-1], int):
        parsed[path[-1]] = value
    else:
        setattr(parsed, path[-1], value)


def value_of(kind: str, data: memoryview) -> str | list[int]:
    """Return the value of a `LongValue` without holding the GIL for long."""
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
