"""Rendering of chat templates in other processes, which can be killed: the server's side of `template_process.py`.

A rendering that has not ended after `_QUICK_S` is restarted as a slow rendering. Slow renderings have permits of their
own and yield to other work. So a template that runs into its limits on some conversations does not delay other clients.

A template is limited in CPU time and memory, and the process itself reports that a limit was reached. If there is no
response at all, the process was killed or stopped. It is replaced, the rendering is tried once more, and after that the
request fails with 503.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from oarlock.base.python_child import start_python
from oarlock.engine.errors import EngineError, RequestError, UnavailableError
from oarlock.server.llm.template_messages import CPU_LIMIT_S, MEMORY_LIMIT_BYTES, REPLY, ReplyKind, request
from oarlock.server.observability.logs import event, logger

_QUICK_S = 0.25
_WALL_TIME_LIMIT_S = (
    10.0  # wall-clock limit of a rendering; exceeds the CPU limit, since other programs use the CPU too
)
_NUM_QUICK = 4  # concurrent renderings
_NUM_SLOW = 2
_NICENESS = 5  # niceness of slow renderings: running requests have priority
_ATTEMPTS = 2  # processes may have been lost for a reason unrelated to this rendering
_READ_AT_ONCE = 1 << 18
_MAX_BYTES_PER_CHARACTER = 4
_MAX_OTHER_BYTES = 4096  # limit for an error
_TOO_MUCH = f"takes more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory, or nests too deeply,"
_LOST = "The process that renders chat templates crashed twice. Send the request again."
_LOST_CODE = "template_process_lost"
# Signals by which a limit ends a renderer: the first for CPU time, the others for deep recursion and for libraries that
# run out of memory.
_LIMIT_SIGNALS = frozenset(str(int(one)) for one in (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
_NO_SIGNAL = "0"  # the process ended without a signal: memory ran out outside of a rendering
_log = logger("chat_template")

Reply = tuple[ReplyKind, str]


class TemplateLimitError(RequestError):
    """Raised if a rendering exceeds its limit of time, memory or text."""

    def __init__(self, did: str) -> None:
        super().__init__(
            f"The model's chat template {did} on these messages, so it was stopped. Send fewer or shorter "
            "messages; if short ones fail too, the operator can serve the model with a --chat-template "
            "that works.",
            "messages",
        )
        self.did = did


class _LostError(Exception):
    """Raised if the renderer ended without a response or does not respond, not due to a limit of the template."""


class RendererProcesses:
    """Source of connections to renderers, whose common parent process starts on demand and again after a loss.

    It ends when the last user is released.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a user may be garbage-collected at any time
        self._num_users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.generation = 0  # number of times that all processes were ended

    def acquire(self) -> None:
        """Add one user."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """Remove one user, and end all processes after the last."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._stop()

    def connect(self) -> socket.socket:
        """Return a connection to a new renderer; closing it kills the renderer."""
        with self._lock:
            for attempt in range(_ATTEMPTS):
                if self._control is None:
                    self._start()
                assert self._control is not None
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    except OSError:
                        ours.close()
                        self._stop()
                        if attempt:
                            raise
                    else:
                        return ours
        raise AssertionError("unreachable")

    def end_stopped(self) -> bool:
        """End all processes if any is stopped by a signal; return whether that was the case."""
        with self._lock:
            process = self._process
            if process is None or not any(map(_is_stopped, (process.pid, *_children(process.pid)))):
                return False
            _log.warning(event("chat_template_process_stopped", pid=process.pid, fix="none: it is restarted"))
            self._stop()
            return True

    def end(self, generation: int) -> None:
        """End all processes of a generation, which do not respond. The next connection starts them again."""
        with self._lock:
            if generation == self.generation:
                self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = start_python(["-m", "oarlock.server.llm.template_process", "--fd", str(fd)], pass_fds=(fd,))
        ours.setblocking(False)  # full if the process has stopped accepting connections; it is then restarted
        self._control = ours
        _log.info(event("chat_template_process_started", pid=self._process.pid))

    def _stop(self) -> None:
        self.generation += 1
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


def _children(pid: int) -> list[int]:
    """Return the processes that `pid` has started; empty on systems without this information."""
    try:
        return [int(name) for name in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger, on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] in ("T", "t")
    except OSError:
        return False


processes = RendererProcesses()  # shared by all templates of this process


class TemplateRenderers:
    """Renderers of one checkpoint's templates. Idle renderers are kept, and killed renderers are replaced on demand."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], cpu_limit_s: float = CPU_LIMIT_S) -> None:
        """`names`: variables of every rendering, such as `bos_token`."""
        self._too_long = f"takes longer than {cpu_limit_s:g} s of processor time"
        self._opening, self._slow_opening = (
            request(dict(sources), dict(names), cpu_limit_s, niceness) for niceness in (0, _NICENESS)
        )
        self._idle: list[socket.socket] = []
        self._release: weakref.finalize | None = None  # releases `processes`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quick = self._slow = asyncio.Semaphore()

    def compile(self) -> Reply:
        """Compile all templates; blocks, so call it in a thread. Raises `TemplateLimitError` and `EngineError`."""
        for _ in range(_ATTEMPTS):
            connection = self._connect()
            try:
                connection.settimeout(_WALL_TIME_LIMIT_S)
                connection.sendall(self._opening + request())
                header = _received(connection, REPLY.size)
                kind, size = REPLY.unpack(header)
                reply = ReplyKind(kind), _received(connection, min(size, _MAX_OTHER_BYTES)).decode("utf-8", "replace")
                self._check(reply, 0)
            except TimeoutError:  # wall-clock limit: other programs may have used the CPU
                connection.close()
                processes.end(processes.generation)
                continue
            except (OSError, _LostError):
                connection.close()
                continue
            except RequestError:
                connection.close()
                raise
            connection.setblocking(False)
            self._idle.append(connection)
            return reply
        raise EngineError("The process that renders chat templates ended before it responded.")

    async def render(self, job: bytes, max_characters: int) -> Reply:
        """Return the response to a rendering, at once or after its turn.

        Raises `TemplateLimitError` and `UnavailableError`.

        Cancelling it ends the work.
        """
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._quick, self._slow = asyncio.Semaphore(_NUM_QUICK), asyncio.Semaphore(_NUM_SLOW)
        with contextlib.suppress(TimeoutError):
            async with self._quick:
                return await self._ask(job, max_characters)
        async with self._slow:
            return await self._ask(job, max_characters, is_slow=True)

    def close(self) -> None:
        """Kill all renderers. The next rendering would start them again."""
        self._close_idle()
        if self._release is not None:
            self._release()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _connect(self) -> socket.socket:
        if self._release is None or not self._release.alive:
            processes.acquire()
            self._release = weakref.finalize(self, processes.release)
        try:
            return processes.connect()
        except OSError as error:
            raise EngineError(f"The process that renders chat templates does not start: {error}.") from None

    async def _ask(self, job: bytes, max_characters: int, *, is_slow: bool = False) -> Reply:
        """Send a job to a renderer. Raises `TimeoutError` unless `is_slow`, and `UnavailableError`.

        Any error ends the renderer, and so does a slow rendering. If a renderer was lost, the idle renderers may be
        lost too.
        """
        most = max(max_characters * _MAX_BYTES_PER_CHARACTER, _MAX_OTHER_BYTES)
        num_lost = 0
        while num_lost < _ATTEMPTS:
            connection, opening = self._renderer(is_slow)
            generation = processes.generation
            try:
                async with asyncio.timeout(_WALL_TIME_LIMIT_S if is_slow else _QUICK_S):
                    reply = await _exchange(connection, opening + job, most)
                self._check(reply, max_characters)
            except TimeoutError:
                connection.close()
                if not processes.end_stopped() and not is_slow:
                    raise
                self._close_idle()
                num_lost += 1
                continue
            except (OSError, _LostError):
                connection.close()
                self._close_idle()
                num_lost += generation == processes.generation  # otherwise another rendering has ended all processes
                continue
            except BaseException:
                connection.close()
                raise
            if is_slow:
                connection.close()
            else:
                self._idle.append(connection)
            return reply
        if is_slow:
            processes.end(generation)  # regardless of their state: the next rendering starts them again
        raise UnavailableError(_LOST, _LOST_CODE)

    def _renderer(self, is_slow: bool) -> tuple[socket.socket, bytes]:
        """Return a renderer, and the data to send to it first."""
        if self._idle and not is_slow:
            return self._idle.pop(), b""
        connection = self._connect()
        connection.setblocking(False)
        return connection, self._slow_opening if is_slow else self._opening

    def _check(self, reply: Reply, max_characters: int) -> None:
        """Raise `TemplateLimitError` if the rendering was stopped, and log it for the operator.

        Raises `_LostError` if the renderer was killed for another reason.
        """
        kind, text = reply
        if kind is ReplyKind.KILLED and text not in (*_LIMIT_SIGNALS, _NO_SIGNAL):
            raise _LostError
        if kind is ReplyKind.KILLED:
            raise _stopped(self._too_long if text == str(int(signal.SIGPROF)) else _TOO_MUCH)
        if kind is ReplyKind.OUT_OF_MEMORY:
            raise _stopped(_TOO_MUCH)
        if kind is ReplyKind.TOO_LARGE:
            raise _stopped(f"writes more than {max_characters} characters")


def _stopped(did: str) -> TemplateLimitError:
    _log.warning(
        event(
            "chat_template_stopped",
            cause=f"it {did}",
            fix="give --chat-template a template that works on every conversation, if this happens with short ones",
        )
    )
    return TemplateLimitError(did)


async def _exchange(connection: socket.socket, data: bytes, most: int) -> Reply:
    """Send a request and return its response, whose text has at most `most` bytes. Raises `_LostError`."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, data)
    received = bytearray()
    size = REPLY.size
    kind = None
    while len(received) < size:
        part = await loop.sock_recv(connection, _READ_AT_ONCE)
        if not part:
            raise _LostError
        received += part
        if kind is None and len(received) >= REPLY.size:
            kind, length = REPLY.unpack_from(received)
            size += length
            if length > most:
                raise _LostError
    assert kind is not None
    return ReplyKind(kind), received[REPLY.size : size].decode()


def _received(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise _LostError
        parts += part
    return bytes(parts)
