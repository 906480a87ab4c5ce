"""The asyncio client of the engine: starts its process, and provides an iterator of events per request.

Knows asyncio and frames. Does not know HTTP, text, or the inside of the engine.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, EXIT_RANK_DIED, EXIT_RANK_HUNG, StartupError
from oarlock.base.watched_reads import StalledReadError, WatchedReads
from oarlock.engine.config import EngineConfig
from oarlock.engine.engine_process import ENGINE_MODULE, EngineProcess
from oarlock.engine.errors import EngineDeadError, OarlockError, RequestError, StalledAdapterError
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameError, FrameReader
from oarlock.engine.kv_cache.block_events import BlockChanges
from oarlock.engine.replay.recording import end_of_killed
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import AdapterInfo, EngineInfo, Request, TokenEvent
from oarlock.workers.adapter_digest import adapter_digest
from oarlock.workers.compile_ahead import CompilationWatch
from oarlock.workers.config import OnProgress, WorkerConfig

logger = logging.getLogger("oarlock.engine.client")

OnBlocks = Callable[[BlockChanges], object]
_Outcome = TokenEvent | OarlockError
T = TypeVar("T")

_READ_BYTES = 1 << 18
_STATS_TIMEOUT_S = 1.0  # a step in flight may take longer; then the last snapshot is used
_HISTORY_TIMEOUT_S = 5.0
_REAP_S = 8.0  # longer than the engine's own limit for its clean-up
_POLL_S = 0.01
_WATCH_S = 0.25
_COMPILING_S = 0.5  # interval of the checks of the kernels' compilation
_SILENCE_MARGIN_S = 1.5  # time for the engine to report a hung rank itself: its report has more details


class EngineClient:
    """One running engine, made by `start`. All methods belong to one event loop.

    The kernel ends the engine together with the thread that started it, so start it from a thread that stays alive.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader,
        info: EngineInfo,
        on_blocks: OnBlocks,
        record_path: str | None,
    ) -> None:
        self.info = info
        self.number = 0  # number among the model's replicas, if there are several
        self.dead = asyncio.Event()  # set when the process has ended; see `exit_code` and `death_cause`
        self.lost = asyncio.Event()  # never set: a single engine has no parts that can be lost separately
        self.exit_code: int | None = None  # 0 after an orderly end
        self.death_cause: str | None = None
        self._process = process
        self._reader = reader
        self._writer = writer
        self._frames = frames
        self._on_blocks = on_blocks
        self._record_path = record_path
        self._ids = itertools.count(1)
        self._queues: dict[int, SingleReaderQueue[_Outcome]] = {}
        self._queries = _Queries(self._send)
        self._adapter_reads = WatchedReads()
        self._last_stats = EngineStats()
        self._last_state: EngineState | None = None
        self._progress_s = time.monotonic()
        self._is_connected = True
        self._is_closing = False
        self._dispatcher = asyncio.create_task(self._dispatch(), name="engine-client")
        self._watch_task = asyncio.create_task(self._watch(), name="engine-watch")

    # -- start and stop

    @staticmethod
    async def start(
        config: EngineConfig,
        on_progress: OnProgress,
        *,
        command: Sequence[str] = ENGINE_MODULE,
        process: EngineProcess | None = None,
        on_blocks: OnBlocks = lambda changes: None,
    ) -> "EngineClient":
        """Start an engine and wait until every rank has loaded. Raises `StartupError`.

        `on_blocks` is called with the changes of the prefix cache, if `config` has them reported. `process` was started
        before; without it, `command` is started now, as in `EngineProcess`.
        """
        if process is None:
            process = EngineProcess(config.worker.tensor_parallel_size, command=command)
        child, ours = process.take()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            writer.write(messages.encode(messages.Config.of(config)))
            frames = FrameReader()
            compiling = asyncio.create_task(_report_compiling(config.worker, on_progress))
            try:
                info = await _until_ready(child, reader, frames, on_progress, compiling)
            finally:
                compiling.cancel()
        except BaseException:  # includes cancellation: the process must not be left behind
            ours.close()
            child.kill()
            child.wait()
            raise
        return EngineClient(child, reader, writer, frames, info, on_blocks, config.record_path)

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop the engine; open requests get their terminal event. After `timeout_s` it is killed. Idempotent."""
        self._is_closing = True
        if self._is_connected:
            self._send(messages.Stop())
        if not await self._ended(timeout_s):
            self._process.kill()
        await self._dispatcher

    # -- requests

    def new_request_id(self) -> int:
        return next(self._ids)

    def choose(self, request: Request, rank: int | None = None) -> "EngineClient":
        """Return the engine for this request and others that share its prompt: always this one, with rank 0."""
        return self

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of one request; the last has a `finish_reason`. Closing the iterator aborts the request.

        Raises `RequestError`, `QueueFullError` or `UnavailableError` before the first event, `EngineDeadError` at any
        time.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._queues:
            raise RequestError(f"Request id {request_id} is in use. Use `new_request_id`.", "request_id")
        try:
            frame = messages.encode(messages.Submit.of(request))
        except FrameError as error:
            raise RequestError(f"The request cannot be sent: {error}.", "prompt") from error
        queue: SingleReaderQueue[_Outcome] = SingleReaderQueue()
        self._queues[request_id] = queue
        try:
            self._writer.write(frame)
            await self._drain()
            while True:
                outcome = await queue.get()
                if not isinstance(outcome, TokenEvent):
                    raise outcome
                yield outcome
                if outcome.finish_reason is not None:
                    return
        finally:
            # Still listed: no terminal event has come, so the engine still works on it.
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]
                if self._is_connected:
                    self._send(messages.Abort(request_id))

    # -- state

    @property
    def is_alive(self) -> bool:
        return self._is_connected and not self._is_closing and self.death_cause is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_progress_age_s(self) -> float:
        """Seconds since the last proof that every rank responds: a step, or a heartbeat of an idle engine."""
        return time.monotonic() - self._progress_s

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal event."""
        return len(self._queues)

    @property
    def replicas(self) -> Sequence["EngineClient"]:
        """The engines, each with `number`, `is_alive` and `stats`."""
        return (self,)

    async def stats(self) -> EngineStats:
        """Return a new snapshot, or the last one if the engine is busy for long or dead (then `state` is "dead")."""
        if self._is_connected:
            with contextlib.suppress(TimeoutError, EngineDeadError):  # the last snapshot is used
                return await asyncio.wait_for(self._queries.send(messages.AskStats), _STATS_TIMEOUT_S)
        return self._last_stats

    async def state(self) -> EngineState | None:
        """Return the live state, or the last known one if the engine is busy for long. None: not known, or dead."""
        if not self.is_alive:
            return None
        with contextlib.suppress(TimeoutError, EngineDeadError):
            self._last_state = await asyncio.wait_for(self._queries.send(messages.AskState), _STATS_TIMEOUT_S)
        return self._last_state

    async def histories(self, request_ids: Sequence[int]) -> list[RequestHistory]:
        """Return the histories of the given requests that are open or ended recently.

        Empty if the engine is dead, or busy for long.
        """
        if self.is_alive:
            with contextlib.suppress(TimeoutError, EngineDeadError):
                asked = self._queries.send(partial(messages.AskHistories, request_ids=list(request_ids)))
                return await asyncio.wait_for(asked, _HISTORY_TIMEOUT_S)
        return []

    # -- LoRA adapters

    async def add_adapter(self, name: str, directory: str) -> None:
        """Let requests name the adapter in `directory` as `name`, and wait until every rank has loaded it.

        `directory`: an absolute path that is the same on every host, in PEFT's or llama.cpp's layout. The engine keeps
        the name, and loads the adapter again from there after it had to leave the ranks' memory, so its files must not
        change before `remove_adapter`. If the name refers to the same content already, only the directory changes.
        Requests that name it while it is loaded wait for the load, and fail if it fails.

        Raises `RequestError` with `param` `lora_path` and the reason if it cannot be read or does not fit the model,
        and with code `adapter_exists` if the name refers to another content: to replace that, remove it first. Raises
        `StalledAdapterError`, or its base class, if nothing could be read for long.
        """
        self._check_alive()
        await self.add_known_adapter(name, await digest_of(name, directory, self._adapter_reads), directory)

    async def add_known_adapter(self, name: str, digest: str, directory: str) -> None:
        """Add an adapter as `add_adapter` does, given the digest of its content."""
        self._check_alive()
        for text, param in ((name, "lora_name"), (directory, "lora_path")):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"{param} is not valid Unicode: {error.reason}.", param) from error
        done = await self._queries.send(lambda number: messages.AddAdapter(number, name, digest, directory))
        done.read()

    async def remove_adapter(self, name: str) -> int:
        """Forget an adapter, and return the number of its requests that were open.

        Each of them ends with one event, in the order of their arrival: `FinishReason.ERROR` with code
        `adapter_unloaded`. Later requests with this name are refused. The content leaves the ranks if it has no other
        name. Raises `RequestError` with code `adapter_not_found` if the name is not known.
        """
        self._check_alive()
        return (await self._queries.send(lambda number: messages.RemoveAdapter(number, name))).read()

    async def list_adapters(self) -> list[AdapterInfo]:
        """Return all adapters, in the order in which they were added. Raises `EngineDeadError`."""
        self._check_alive()
        return await self._queries.send(messages.AskAdapters)

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache and return how many blocks it had. Waits for the step in flight. Raises
        `EngineDeadError`.
        """
        self._check_alive()
        return await self._queries.send(messages.ResetCache)

    # -- the reading side

    async def _dispatch(self) -> None:
        """Pass every frame to the call that waits for it until the socket ends, then fail all waiting calls."""
        cause: str | None = None
        try:
            while data := await self._reader.read(_READ_BYTES):
                for payload in self._frames.feed(data):
                    self._receive(messages.read_from_engine(payload))
        except ConnectionError as error:  # includes an end of the socket: the engine ended without reading everything
            logger.info('event=engine_socket_reset cause="%s"', error)
        except Exception as error:
            logger.exception("event=engine_socket_failed")
            cause = f"the engine's socket failed: {error}"
        finally:
            self._is_connected = False
            self._watch_task.cancel()
            self._last_stats.state = "dead"
            self._writer.close()
            if cause is not None:
                self.death_cause = self.death_cause or cause
            self._fail_all()
        await asyncio.wait((self._watch_task,))
        await self._reap()

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Events():
                self._progress_s = time.monotonic()
                for event in message.read():
                    queue = self._queues.get(event.request_id)
                    if queue is None:
                        continue  # its iterator was closed a moment ago
                    if event.finish_reason is not None:
                        del self._queues[event.request_id]
                    queue.put(event)
            case messages.Blocks():
                self._on_blocks(message.read())
            case messages.Alive():
                self._progress_s = time.monotonic()
            case messages.Refused():
                if (queue := self._queues.pop(message.request_id, None)) is not None:
                    queue.put(message.exception())
            case messages.Stats(number, stats):
                self._last_stats = stats
                self._queries.resolve(number, stats)
            case messages.State(number, value) | messages.Histories(number, value) | messages.CacheReset(number, value):
                self._queries.resolve(number, value)
            case messages.Adapters(number, value):
                self._queries.resolve(number, value)
            case messages.AdapterDone():
                self._queries.resolve(message.number, message)
            case messages.Dead(cause, exit_code):
                self.death_cause, self.exit_code = cause, exit_code
                self._fail_all()
            case _:
                raise FrameError(f"the engine sent {type(message).__name__}, which is a message of the start")

    def _fail_all(self) -> None:
        """End every waiting call, since the engine is gone."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.put(self._death())
        self._queries.fail_all(self._death())

    async def _watch(self) -> None:
        """Kill an engine that is silent for longer than a working engine can be, because it is stopped or hangs."""
        limit_s = self.info.max_silence_s + _SILENCE_MARGIN_S
        silent_s, seen_s = 0.0, self._progress_s
        before = time.monotonic()
        while silent_s <= limit_s:
            await asyncio.sleep(_WATCH_S)
            if not self.is_alive:
                return
            now = time.monotonic()
            # Time in which this process itself was stopped does not count: some frames may not have been read yet.
            silent_s += min(now - before, 2 * _WATCH_S)
            before = now
            if self._progress_s != seen_s:
                silent_s, seen_s = 0.0, self._progress_s
        logger.error("event=engine_hung silent_s=%.1f limit_s=%g", silent_s, limit_s)
        self.death_cause, self.exit_code = f"the engine process has sent nothing for {silent_s:.1f} s", EXIT_RANK_HUNG
        self._fail_all()
        for pid in self.info.rank_pids:  # still valid, since the hung parent has not reaped them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()

    async def _reap(self) -> None:
        """Wait for the end of the process, set `exit_code` and `death_cause`, and then `dead`."""
        if not await self._ended(_REAP_S):
            self._process.kill()
            await self._ended(_REAP_S)
        status = self._process.poll()
        if status is None or status < 0:
            self.death_cause = self.death_cause or f"the engine process was ended by {_signal_name(status)}"
            self.exit_code = self.exit_code or EXIT_RANK_DIED
            if self._record_path is not None:  # a killed engine could not record its end
                end_of_killed(self._record_path, self.death_cause)
        else:
            self.exit_code = status
            if status:
                self.death_cause = self.death_cause or f"the engine process ended with exit code {status}"
        self.dead.set()

    async def _ended(self, timeout_s: float) -> bool:
        """Return whether the process ends within `timeout_s`. Polls, as a waiting thread would outlive a cancelled
        call.
        """
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _send(self, message: messages.Message) -> None:
        self._writer.write(messages.encode(message))

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):  # the dispatcher notices the same end and fails all calls
            await self._writer.drain()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise self._death()

    def _death(self) -> EngineDeadError:
        if self._is_closing:
            return EngineDeadError("The server is shutting down.")
        return EngineDeadError("The inference engine has stopped. No request can be served until it is restarted.")


class SingleReaderQueue(Generic[T]):
    """Queue of events or an error for one request, for its only reader; cheaper to wake than `asyncio.Queue`.

    It receives an event for each token, and for each step of a prompt that is scored.
    """

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None  # set while the reader waits

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> T:
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._items.popleft()


class _Queries:
    """Queries to the engine that wait for a response, by number."""

    def __init__(self, send: Callable[[messages.Message], object]) -> None:
        """`send`: sends a message to the engine."""
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def send(self, query: Callable[[int], messages.Message]) -> Any:
        """Send the message `query(number)` and return its response. Raises the error passed to `fail_all`."""
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(query(number))
        try:
            return await future
        finally:
            self._open.pop(number, None)

    def resolve(self, number: int, value: Any) -> None:
        """Pass a response to the caller that waits for it; drop it if the caller has left."""
        future = self._open.pop(number, None)
        if future is not None and not future.done():
            future.set_result(value)

    def fail_all(self, error: Exception) -> None:
        """Fail all open queries, since the engine will not respond to them."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


async def digest_of(name: str, directory: str, reads: WatchedReads) -> str:
    """Return the digest of the adapter in `directory`, which another thread reads. `name`: for errors.

    Cancelling the call ends the read. Raises `RequestError` and `StalledAdapterError`.
    """
    try:
        return await reads.run(lambda on_read: adapter_digest(directory, on_read), directory)
    except StalledReadError:
        raise StalledAdapterError(name, directory) from None
    except OSError as error:
        raise RequestError(f"The adapter {directory} cannot be read: {error.strerror}.", "lora_path") from error


async def _report_compiling(config: WorkerConfig, on_progress: OnProgress) -> None:
    """Report the compilation of the CPU kernels until cancelled, since ranks that wait for it report nothing."""
    if config.device == "cuda":
        return
    watch = CompilationWatch(config.model_path, config.dtype)
    while True:
        if (state := watch.read()) is not None:
            on_progress("compiling kernels", *state)
        await asyncio.sleep(_COMPILING_S)


async def _until_ready(
    process: subprocess.Popen[bytes],
    reader: asyncio.StreamReader,
    frames: FrameReader,
    on_progress: OnProgress,
    compiling: asyncio.Task[None],
) -> EngineInfo:
    """Wait until every rank has loaded. `compiling`: cancelled when the engine itself reports progress."""
    while data := await reader.read(_READ_BYTES):
        compiling.cancel()
        for payload in frames.feed(data):
            match message := messages.read_from_engine(payload):
                case messages.Progress(phase, fraction, detail):
                    on_progress(phase, fraction, detail)
                case messages.Failed():
                    raise message.error()
                case messages.Ready(info):
                    return info  # the engine sends nothing more until it is asked
                case _:
                    raise FrameError(f"the engine sent {type(message).__name__} while starting")
    status = await asyncio.to_thread(process.wait)
    how = f"exit code {status}" if status >= 0 else f"it was ended by {_signal_name(status)}"
    raise StartupError(
        f"The engine process ended while starting ({how}).",
        "If it was killed, the machine ran out of memory: use a smaller model. Otherwise see the lines above.",
        status if status > 0 else EXIT_OUT_OF_MEMORY if status == -signal.SIGKILL else EXIT_RANK_DIED,
    )


def _signal_name(status: int | None) -> str:
    try:
        return signal.Signals(-(status or 0)).name
    except ValueError:
        return f"signal {-(status or 0)}"
