"""Renders chat templates in other processes, which can be killed: the server's side of `template_process.py`.

A rendering that has not ended after a moment is started again among the slow ones, which have places of their own and
give way to other work: so a template that runs into its limits on some conversations does not keep those of other
clients waiting.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping

from oarlock.engine.errors import EngineError, RequestError
from oarlock.engine.python_child import start_python
from oarlock.server.llm.template_messages import ANSWER, CPU_LIMIT_S, MEMORY_LIMIT_BYTES, Kind, request
from oarlock.server.observability.logs import event, logger

_QUICK_S = 0.25
_PATIENCE_S = 10.0  # for the processor's time by the clock, where other programs take the processor
_NUM_QUICK = 4  # renderings at once
_NUM_SLOW = 2
_NICENESS = 5  # of slow ones: requests that are being answered come first
_ATTEMPTS = 2  # the processes may have been lost for a reason that has nothing to do with this rendering
_START_TIMEOUT_S = 10.0
_READ_AT_ONCE = 1 << 18
_MAX_BYTES_PER_CHARACTER = 4
_MAX_OTHER_BYTES = 4096  # of an error
_TOO_MUCH = f"takes more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory, or nests too deeply,"
_log = logger("chat_template")

Answer = tuple[Kind, str]


class TemplateLimitError(RequestError):
    """A rendering took more time, memory or text than it may."""

    def __init__(self, did: str) -> None:
        super().__init__(
            f"The model's chat template {did} on these messages, so it was stopped. Send fewer or shorter messages; "
            "if short ones fail too, the operator can serve the model with --chat-template and a template that works.",
            "messages",
        )
        self.did = did


class _LostError(Exception):
    """The connection ended without an answer."""


class RendererProcesses:
    """Gives connections to renderers, whose common parent is started with the first and again when it was lost.

    It ends with the last user.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a user may be collected as garbage at any time
        self._num_users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def acquire(self) -> None:
        """Count one user more."""
        with self._lock:
            self._num_users += 1

    def release(self) -> None:
        """Count one user less, and end all processes after the last."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._stop()

    def connect(self) -> socket.socket:
        """A connection to a new renderer; closing it kills the renderer."""
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

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = start_python(["-m", "oarlock.server.llm.template_process", "--fd", str(fd)], pass_fds=(fd,))
        ours.settimeout(_START_TIMEOUT_S)
        self._control = ours
        _log.info(event("chat_template_process_started", pid=self._process.pid))

    def _stop(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()


processes = RendererProcesses()  # one for all templates of this process


class TemplateRenderers:
    """Renderers of one checkpoint's templates. Idle ones are kept, and one that was killed is replaced when needed."""

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str], cpu_limit_s: float = CPU_LIMIT_S) -> None:
        """`names`: variables of every rendering, such as `bos_token`."""
        self._too_long = f"takes longer than {cpu_limit_s:g} s of processor time"
        self._opening, self._slow_opening = (
            request(dict(sources), dict(names), cpu_limit_s, niceness) for niceness in (0, _NICENESS)
        )
        self._idle: list[socket.socket] = []
        self._release: weakref.finalize | None = None  # of `processes`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quick = self._slow = asyncio.Semaphore()

    def compile(self) -> Answer:
        """Compile all templates, for a thread. Raises `TemplateLimitError` and `EngineError`."""
        for _ in range(_ATTEMPTS):
            connection = self._connect()
            try:
                connection.settimeout(_PATIENCE_S)
                connection.sendall(self._opening + request())
                header = _received(connection, ANSWER.size)
                kind, size = ANSWER.unpack(header)
                answer = Kind(kind), _received(connection, min(size, _MAX_OTHER_BYTES)).decode("utf-8", "replace")
                self._check(answer, 0)
            except TimeoutError:
                connection.close()
                raise TemplateLimitError(self._too_long) from None
            except (OSError, _LostError):
                connection.close()
                continue
            except RequestError:
                connection.close()
                raise
            connection.setblocking(False)
            self._idle.append(connection)
            return answer
        raise EngineError("The process that renders chat templates ends before it has answered.")

    async def render(self, job: bytes, max_characters: int) -> Answer:
        """The answer to a rendering, at once or after its turn. Raises `TemplateLimitError` and `EngineError`.

        Cancelling it ends the work.
        """
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._quick, self._slow = asyncio.Semaphore(_NUM_QUICK), asyncio.Semaphore(_NUM_SLOW)
        with contextlib.suppress(TimeoutError):
            async with self._quick:
                return await self._ask(job, max_characters)
        async with self._slow:
            try:
                return await self._ask(job, max_characters, is_slow=True)
            except TimeoutError:
                raise _stopped(self._too_long) from None

    def close(self) -> None:
        """Kill all renderers. The next rendering would start them again."""
        while self._idle:
            self._idle.pop().close()
        if self._release is not None:
            self._release()

    def _connect(self) -> socket.socket:
        if self._release is None or not self._release.alive:
            processes.acquire()
            self._release = weakref.finalize(self, processes.release)
        try:
            return processes.connect()
        except OSError as error:
            raise EngineError(f"The process that renders chat templates does not start: {error}.") from None

    async def _ask(self, job: bytes, max_characters: int, *, is_slow: bool = False) -> Answer:
        """Send a job to a renderer. Raises `TimeoutError`.

        Any error ends the renderer, and so does a slow rendering.
        """
        most = max(max_characters * _MAX_BYTES_PER_CHARACTER, _MAX_OTHER_BYTES)
        for _ in range(_ATTEMPTS):
            connection, opening = self._renderer(is_slow)
            try:
                async with asyncio.timeout(_PATIENCE_S if is_slow else _QUICK_S):
                    answer = await _exchange(connection, opening + job, most)
                self._check(answer, max_characters)
            except TimeoutError:
                connection.close()
                raise
            except (OSError, _LostError):
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if is_slow:
                connection.close()
            else:
                self._idle.append(connection)
            return answer
        raise EngineError("The process that renders chat templates ends before it has answered.")

    def _renderer(self, is_slow: bool) -> tuple[socket.socket, bytes]:
        """A renderer, and what it has to be sent first."""
        if self._idle and not is_slow:
            return self._idle.pop(), b""
        connection = self._connect()
        connection.setblocking(False)
        return connection, self._slow_opening if is_slow else self._opening

    def _check(self, answer: Answer, max_characters: int) -> None:
        """Raise `TemplateLimitError` for what was stopped, and log it for the operator."""
        kind, text = answer
        if kind is Kind.KILLED:
            raise _stopped(self._too_long if text == str(int(signal.SIGPROF)) else _TOO_MUCH)
        if kind is Kind.OUT_OF_MEMORY:
            raise _stopped(_TOO_MUCH)
        if kind is Kind.TOO_LARGE:
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


async def _exchange(connection: socket.socket, data: bytes, most: int) -> Answer:
    """Send a request and read its answer of at most so many bytes."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, data)
    received = bytearray()
    size = ANSWER.size
    kind = None
    while len(received) < size:
        part = await loop.sock_recv(connection, _READ_AT_ONCE)
        if not part:
            raise _LostError
        received += part
        if kind is None and len(received) >= ANSWER.size:
            kind, length = ANSWER.unpack_from(received)
            size += length
            if length > most:
                raise _LostError
    assert kind is not None
    return Kind(kind), received[ANSWER.size : size].decode()


def _received(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise _LostError
        parts += part
    return bytes(parts)
