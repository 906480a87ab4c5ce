"""The lifecycle of one server process: bind, respond to probes, load, serve, drain, exit with a code.

Only the supervisor handles signals and changes the phase of `ServerState`. Exit codes: 0 clean; 2 usage; 3 bad
configuration or model; 4 out of memory at start; 5 a worker died; 6 a worker hung; 7 the drain timed out with requests
lost; 128 + n second signal n.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.engine_process import EngineProcess
from oarlock.engine.errors import EngineDeadError
from oarlock.server.chat.template_report import report_foldings
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.app import create_app
from oarlock.server.endpoints.chat.serving import try_tool_format
from oarlock.server.endpoints.serving import connect_engine
from oarlock.server.errors import HttpError
from oarlock.server.http.listeners import listen, remove_unused, url_of, warn_if_exposed
from oarlock.server.http.memory_release import map_large_buffers
from oarlock.server.http.server_state import STALL_LIMIT_S, Phase, ServerState
from oarlock.server.http.tls import ServerTls
from oarlock.server.http.uvicorn_server import HttpServer, raise_descriptor_limit
from oarlock.server.hub.adapter_path import find_start_adapters
from oarlock.server.hub.model_path import served_names
from oarlock.server.launch import banner
from oarlock.server.launch.service_manager import ServiceManager
from oarlock.server.llm.generation import Engine
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.introduction import Introduction
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import Tokenizer, find_files
from oarlock.server.observability import logs
from oarlock.server.observability.metrics import HttpCounters
from oarlock.workers.config import NodesConfig, OnProgress
from oarlock.workers.node import check_network

if TYPE_CHECKING:
    from oarlock.server.launch.ray_group import RayGroup

EXIT_WORKER_DIED = 5
EXIT_DRAIN_TIMED_OUT = 7
_ERROR_DELIVERY_S = 2.0  # time for open streams to send their error event
_CLOSE_ENGINE_S = 5.0
_ENGINE_EXIT_S = 4.0  # time to get the exit code of an engine that is ending
_LIVENESS_S = 0.25
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logs.logger("supervisor")


class RunningEngine(Engine, Protocol):
    """Engine as the supervisor uses it: `oarlock.engine.client.EngineClient` or `oarlock.engine.replicas.Replicas`."""

    dead: asyncio.Event  # its process has ended, with `exit_code`
    lost: asyncio.Event  # a replica has ended for good, with `exit_code`: the others can finish their requests

    @property
    def is_alive(self) -> bool: ...

    @property
    def last_progress_age_s(self) -> float: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def death_cause(self) -> str | None: ...

    async def close(self, timeout: float, /) -> None: ...


StartEngine = Callable[[EngineConfig, OnProgress], Awaitable[RunningEngine]]


class Supervisor:
    """One server, from the bound socket to the exit code."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        start_engine: StartEngine,
        nodes: NodesConfig | None = None,
        manager: ServiceManager | None = None,
        tls: ServerTls | None = None,
        ray: RayGroup | None = None,
    ) -> None:
        """Create the app and its HTTP server. `nodes`: how to find the other hosts, if there are any; this host is
        their head. `manager`: is notified of phases, and may have opened the socket. `tls`: HTTPS is served. `ray`: has
        started the other hosts' parts."""
        self.settings = settings
        self._manager = manager or ServiceManager({})
        self._nodes = nodes
        self._ray = ray
        self.state = ServerState(stall_limit_s=min(STALL_LIMIT_S, settings.step_timeout or STALL_LIMIT_S))
        self.counters = HttpCounters()
        self.counters.certificate = tls
        self._start_engine = start_engine
        self._listener = listener
        self._url = url_of(listener, "http" if tls is None else "https")
        self._server = HttpServer(create_app(settings, self.state, self.counters), listener, tls=tls)
        self._progress = banner.Progress(as_events=settings.log_format == "json")
        self._engine: RunningEngine | None = None
        self._tokenizer: Tokenizer | None = None
        self._generation_config = GenerationConfig()
        self._pooler = PoolerConfig()
        self._abort = asyncio.Event()
        self._signal = 0
        self._watchdogs: list[threading.Timer] = []

    async def run(self) -> int:
        """Serve until a signal or a drain. Returns the exit code. Raises `StartupError` if the start fails."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1, "files"))  # tasks that wait for disks take turns
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._server.run_until_stopped())
        watch = asyncio.create_task(self._manager.watch())
        try:
            return await self._load_and_serve()
        finally:
            watch.cancel()
            await self._shut_down(http)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            for watchdog in self._watchdogs:
                watchdog.cancel()

    async def _load_and_serve(self) -> int:
        self.state.phase = Phase.LOADING
        loading = asyncio.create_task(self._load())
        part_failed = asyncio.create_task(self._part_failure())
        await _first(loading, part_failed, self.state.stop.wait())
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,), timeout=_CLOSE_ENGINE_S)
            if part_failed.done():
                raise part_failed.result()
            return 0
        part_failed.cancel()
        engine = loading.result()
        self._start_serving(engine)
        dead = asyncio.create_task(_engine_has_died(engine))
        try:
            await _first(dead, engine.lost.wait(), self.state.stop.wait())
            if dead.done():
                return await self._on_engine_death(engine)
            self.state.drain()
            return await self._drain(engine, dead)
        finally:
            dead.cancel()

    async def _part_failure(self) -> StartupError:
        while self._ray is None:
            await asyncio.Event().wait()
        return await self._ray.failed()

    async def _load(self) -> RunningEngine:
        """Find the checkpoint, then read the tokenizer and start the engine in parallel."""
        if self._nodes is not None:
            await asyncio.to_thread(check_network, self._nodes, self._on_progress)
        files = await find_files(self.settings, self._on_progress)
        config = self.settings.engine_config(files.model, self._nodes, files.tokenizer)
        self._generation_config = GenerationConfig.load(files.model, self.settings.generation_config)
        self.state.introduction = Introduction.load(files.model)
        pooler = PoolerConfig.load(files.model, self.settings.runner, self.settings.classifier_from_token)
        adapters = await find_start_adapters(self.settings, self._on_progress)
        known = tuple((found.module.name, found.directory) for found in adapters)
        config = replace(config, writes_text=pooler.generates, worker=config.worker.with_(lora_adapters=known))
        tokenizer = asyncio.create_task(asyncio.to_thread(files.load_tokenizer))
        engine = asyncio.ensure_future(self._start_engine(config, self._on_progress))
        try:
            self._tokenizer = await tokenizer  # much faster, so a missing file is reported before the load ends
            self._pooler = pooler.loaded(self._tokenizer)
            if self._pooler.generates and self._tokenizer.template.exists:
                await try_tool_format(self._tokenizer.template)
                await report_foldings(self._tokenizer.template)
            self._engine = await engine
        except BaseException:
            engine.cancel()
            await asyncio.wait((engine,), timeout=_CLOSE_ENGINE_S)
            raise
        generation_config = self._generation_config
        async_llm = connect_engine(
            self.settings, self.state, self.counters, self._engine, self._tokenizer, generation_config, self._pooler
        )
        if async_llm.adapters is not None:
            await async_llm.adapters.load_at_start(adapters, self._on_progress)
        return self._engine

    def _on_progress(self, phase: str, fraction: float, detail: str = "") -> None:
        self.state.loading_step, self.state.loading_fraction, self.state.loading_detail = phase, fraction, detail
        self._progress(phase, fraction, detail)
        self._manager.loading(phase, fraction)

    def _start_serving(self, engine: RunningEngine) -> None:
        async_llm = self.state.async_llm
        assert self._tokenizer is not None and async_llm is not None
        self._progress.finish()
        self.state.heartbeat = engine
        if self.state.batches is not None:
            self.state.batches.start()
        # Objects of the start live as long as the process: the garbage collector must not pause to scan them.
        gc.collect()
        gc.freeze()
        gc.enable()
        self.state.phase = Phase.READY
        info = engine.info
        if self._tokenizer.vocab_size > info.vocab_size:
            sizes = {"tokenizer": self._tokenizer.vocab_size, "model": info.vocab_size}
            _log.warning(logs.event("tokenizer_larger_than_model", **sizes))
        config = self._generation_config
        if config.sampling or config.max_new_tokens:
            limit = {"max_new_tokens": config.max_new_tokens} if config.max_new_tokens else {}
            _log.info(logs.event("sampling_defaults", source=config.source, **config.sampling, **limit))
        exposed = warn_if_exposed(self.settings)
        if exposed:
            _log.warning(logs.event("listening_without_auth", warning=exposed))
        _log.info(
            logs.event(
                "ready",
                url=self._url,
                dtype=info.dtype,
                device=info.device,
                ranks=info.tensor_parallel_size * info.pipeline_parallel_size,
                nodes=None if info.nnodes == 1 else info.nnodes,
            )
        )
        names = served_names(self.settings)
        chat = self._pooler.generates and self._tokenizer.template.exists
        key = self.settings.has_api_keys
        max_len = async_llm.input_processor.max_len
        self._manager.ready()
        seconds, page = self._progress.seconds, self.settings.web_page and self._url.startswith("http")
        task, about = str(self._pooler.task), self.state.introduction.about
        adapters = [] if async_llm.adapters is None else [adapter.name for adapter in async_llm.adapters.list()]
        text = banner.banner(self._url, names, info, max_len, chat, seconds, key, page, task, about, adapters)
        print(text, flush=True)

    async def _on_engine_death(self, engine: RunningEngine) -> int:
        """Fail every open request. Returns the exit code of the cause."""
        self.state.phase = Phase.DEAD
        self._exit_within(8.0, engine.exit_code or EXIT_WORKER_DIED)
        _log.error(logs.event("engine_dead", cause=engine.death_cause or "its process has ended"))
        await self._fail_open_requests(EngineDeadError(engine.death_cause or "The engine has stopped."))
        with contextlib.suppress(TimeoutError):  # the exit code is known once its process has ended
            async with asyncio.timeout(_ENGINE_EXIT_S):
                await engine.dead.wait()
        return engine.exit_code or EXIT_WORKER_DIED

    async def _drain(self, engine: RunningEngine, dead: asyncio.Task[None]) -> int:
        """Refuse new requests and finish running ones, until a second signal, a dead engine or the time limit.

        Returns the exit code.
        """
        self.state.phase = Phase.DRAINING
        self._manager.stopping(self.settings.drain_timeout + _CLOSE_ENGINE_S + _ENGINE_EXIT_S)
        if self._manager.num_sockets:  # the next process gets the socket and all connections from now on
            self._server.stop_accepting()
        running = self.state.num_in_flight
        self._exit_within(self.settings.drain_timeout + 10.0, EXIT_DRAIN_TIMED_OUT)
        if self.state.batches is not None:
            await self.state.batches.stop()
        _log.info(logs.event("draining", requests=running, timeout_s=self.settings.drain_timeout))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout):
                await _first(self.state.idle.wait(), self._abort.wait(), asyncio.shield(dead))
        if self._abort.is_set():
            await self._fail_open_requests(_stopped_error())
            return 128 + self._signal
        if dead.done():
            return await self._on_engine_death(engine)
        lost = self.state.num_in_flight
        if lost:
            _log.error(logs.event("drain_timed_out", requests_lost=lost))
            await self._fail_open_requests(_stopped_error())
            return EXIT_DRAIN_TIMED_OUT
        return engine.exit_code or 0

    async def _fail_open_requests(self, error: Exception) -> None:
        """End every open request with this error, and wait until it is sent."""
        if self.state.async_llm is not None:
            self.state.async_llm.fail_all(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ERROR_DELIVERY_S):
                await self.state.idle.wait()

    async def _shut_down(self, http: asyncio.Task[None]) -> None:
        self._progress.finish()
        if self.state.phase is not Phase.DEAD:
            self.state.phase = Phase.DRAINING
        self._server.should_exit = True
        self._server.force_exit = self._abort.is_set()
        await asyncio.wait((http,), timeout=_CLOSE_ENGINE_S)
        if self._engine is not None:
            await self._engine.close(0.5 if self._abort.is_set() else _CLOSE_ENGINE_S)
        if self.state.tracer is not None:
            await self.state.tracer.close()
        if self.state.batches is not None:
            await self.state.batches.close()
        if self._tokenizer is not None:
            self._tokenizer.close()
        self.state.large_bodies.close()
        self._listener.close()
        if self.settings.uds is not None and not self._manager.num_sockets:
            remove_unused(self.settings.uds)
        _log.info(logs.event("stopped"))

    def _exit_within(self, seconds: float, code: int) -> None:
        """Start a watchdog: the process exits even if the shutdown hangs. Children follow, because they read
        end-of-file."""
        watchdog = threading.Timer(seconds, _exit_now, (code,))
        watchdog.daemon = True
        watchdog.start()
        self._watchdogs.append(watchdog)

    def _on_signal(self, number: int) -> None:
        if self._signal:
            self._exit_within(2.0, 128 + number)
            self._abort.set()
        self._signal = number
        self.state.drain()


def server_tls(settings: Settings) -> ServerTls | None:
    """Return the certificate to serve HTTPS with; None if there is none. Raises `StartupError`."""
    if settings.ssl_certfile is None or settings.ssl_keyfile is None:
        return None
    return ServerTls(settings.ssl_certfile, settings.ssl_keyfile)


def serve(
    settings: Settings,
    processes: Sequence[EngineProcess],
    nodes: NodesConfig | None = None,
    ray: RayGroup | None = None,
) -> int:
    """Bind, run and return the exit code. `processes`: already started, for the engine or for each replica, and used
    once their configuration is known.

    `nodes`: how to find the other hosts, if there are any; `ray` has started their parts. Raises `StartupError`.
    """
    logs.configure(settings.log_level, settings.log_format)
    raise_descriptor_limit()
    map_large_buffers()
    tls, manager = server_tls(settings), ServiceManager(os.environ)
    listener, settings = manager.listener(settings) or (listen(settings), settings)

    async def run() -> int:
        return await Supervisor(settings, listener, partial(_start_engine, processes), nodes, manager, tls, ray).run()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # optional: the standard loop works, a little slower
        return None
    return uvloop.new_event_loop


async def _start_engine(
    processes: Sequence[EngineProcess], config: EngineConfig, on_progress: OnProgress
) -> RunningEngine:
    from oarlock.engine.replicas import start_engine

    try:
        return await start_engine(config, on_progress, processes=processes)
    except OSError as error:  # its process ended in the middle of a message
        raise StartupError(
            f"The engine process could not be started ({error}).", "See the lines above.", EXIT_WORKER_DIED
        ) from None


async def _engine_has_died(engine: RunningEngine) -> None:
    """Wait until the engine can serve no more. Its process may need seconds more to end."""
    while engine.is_alive and not engine.dead.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LIVENESS_S):
                await engine.dead.wait()


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Wait until one awaitable is done. Tasks that were created here are cancelled, tasks of the caller are not."""
    tasks = [asyncio.ensure_future(item) for item in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(tasks, awaitables, strict=True):
            if task is not given:
                task.cancel()


def _exit_now(code: int) -> None:
    sys.stderr.write("the shutdown took too long; exiting now\n")
    sys.stderr.flush()
    os._exit(code)


def _stopped_error() -> HttpError:
    return HttpError(503, "The server is shutting down and could not finish this request.", code="server_draining")
