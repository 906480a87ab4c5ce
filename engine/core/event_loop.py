"""The engine's loop: read frames, run a step, send its events. An idle engine blocks in one `select`, with a heartbeat.

An exception with one request ends that request. A lost rank ends every request, each with one event, and the loop. Does
not know asyncio, HTTP or text; never waits for the frontend to read.
"""

import logging
import os
import selectors
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import INTERNAL, QueueFullError, RequestError, UnavailableError, WorkerError
from engine.ipc import messages
from engine.ipc.frame_socket import FrameSocket, FrameSocketClosedError
from engine.ipc.frames import Frame, FrameError
from engine.stats import EngineStats
from engine.types import FinishReason, Request, TokenEvent

if TYPE_CHECKING:
    from engine.structured_output.manager import StructuredOutputManager
    from workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

EXIT_OK = 0
EXIT_BUG = 1
EXIT_RANK_DIED = 5
EXIT_RANK_HUNG = 6

DEAD = "The inference engine stopped while this request was running. Nothing more can be served until it is restarted."
STOPPING = "The server is shutting down; this request was not completed."

_DRAIN_S = 2.0  # for sending the last events to a frontend that reads slowly


class EngineLoop:
    """Owns the steps and the socket. `run` returns the process's exit code; the caller closes the executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: "Executor",
        frame_socket: FrameSocket,
        *,
        structured_output: "StructuredOutputManager | None" = None,
        wake_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_core = EngineCore(config, executor, clock)
        self.scheduler = self.engine_core.scheduler
        self.busy_since: float | None = None  # when the running step or ping began; read by the watchdog
        self._executor = executor
        self._frame_socket = frame_socket
        self._structured_output = structured_output
        self._clock = clock
        self._interval_s = config.heartbeat_interval_s
        self._started_s = clock()
        self._next_beat_s = self._started_s + self._interval_s
        # Ranks in processes of their own compute while events are sent; an inline rank computes inside `submit`.
        self._sends_during_step = bool(executor.rank_pids)
        self._request_reader = messages.RequestReader()
        self._outbox: list[TokenEvent] = []
        self._stopping = False
        self._was_stuck = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(frame_socket, selectors.EVENT_READ, "socket")
        for fd in executor.fileno_for_death():
            self._selector.register(fd, selectors.EVENT_READ, "death")
        if structured_output is not None:
            self._selector.register(structured_output, selectors.EVENT_READ, "structured_output")
        if wake_fd is not None:
            os.set_blocking(wake_fd, False)
            self._selector.register(wake_fd, selectors.EVENT_READ, "wake")

    def stop(self) -> None:
        """Leave the loop after the step in flight. May be called from a signal handler."""
        self._stopping = True

    def run(self) -> int:
        """Until `stop`, or until the frontend or a rank is gone."""
        try:
            while not self._stopping:
                if not self.tick() and not self._stopping:
                    self._wait()
            self._shut_down(STOPPING)
            return EXIT_OK
        except FrameSocketClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
            return EXIT_OK
        except WorkerError as error:
            logger.error('event=rank_lost rank=%d step=%d hung=%s cause="%s"', *_facts(error))
            return self._die(str(error), EXIT_RANK_HUNG if error.hung else EXIT_RANK_DIED)
        except Exception as error:
            logger.exception("event=engine_failed")
            return self._die(f"the engine loop failed: {type(error).__name__}", EXIT_BUG)

    def tick(self) -> bool:
        """One turn: inbox, the next step, outbox, an answer. False when nothing can be computed now; then no step is in
        flight."""
        self._receive()
        if self._stopping or self._frame_socket.is_full:
            while self.engine_core.num_in_flight:
                self._finish_step()
            return False
        self.busy_since = self._clock()
        output = self.engine_core.begin()
        self._outbox += self.engine_core.take_events()
        self._send_outbox()
        if output is None and not self.engine_core.num_in_flight:
            self.busy_since = None
            return self._may_go_on()
        self._was_stuck = False
        if output is None or self.engine_core.is_full:
            self._finish_step()
        return True

    def _finish_step(self) -> None:
        """Wait for the answer to the oldest step in flight."""
        self.busy_since = self._clock()
        self._outbox += self.engine_core.finish()
        self.busy_since = None
        self._next_beat_s = self._clock() + self._interval_s
        if not self._outbox:
            self._frame_socket.send(messages.alive(self.scheduler.stats.step_id))
        if not self._sends_during_step:
            self._send_outbox()

    # -- inbox

    def _receive(self) -> None:
        for frame in self._frame_socket.receive():
            self._handle(frame)
        self._add_compiled()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == "request":
            self._add(frame)
        elif frame.kind == "abort":
            self._abort(messages.read_id(frame))
        elif frame.kind == "stats":
            self._frame_socket.send(messages.stats(messages.read_number(frame), self.snapshot()))
        elif frame.kind == "reset_cache":
            num_blocks = self.scheduler.kv_cache_manager.reset_prefix_cache()
            self._frame_socket.send(messages.cache_reset(messages.read_number(frame), num_blocks))
        elif frame.kind == "stop":
            self.stop()
        else:
            raise FrameError(f"the frontend sent a {frame.kind!r} frame")

    def _add(self, frame: Frame) -> None:
        with self._refusing(messages.read_id(frame)):
            request = self._request_reader.read(frame)
            self._count_pending()
            if request.params.grammar is None:
                self.scheduler.add(request, self._clock())
            else:
                self._add_with_grammar(request, self._clock())

    def _count_pending(self) -> None:
        manager = self._structured_output
        if manager is not None:
            self.scheduler.set_pending(manager.num_pending, manager.num_pending_tokens)

    @contextmanager
    def _refusing(self, request_id: int) -> Generator[None]:
        """Send the refusal of a request that cannot be added; an exception of ours ends that request alone."""
        try:
            yield
        except (RequestError, QueueFullError) as error:
            self._frame_socket.send(messages.refused(request_id, error))
        except UnavailableError as error:
            self.scheduler.stats.num_errors += 1
            self._frame_socket.send(messages.refused(request_id, error))
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=add", request_id)
            self._outbox.append(self._fail(request_id))

    def _add_with_grammar(self, request: Request, now: float) -> None:
        """A request whose grammar must be compiled first is pending in the manager until then."""
        if self._structured_output is None:
            raise RequestError("This engine was started without grammars.", "structured_outputs")
        self.scheduler.check(request, now)
        try:
            matcher = self._structured_output.submit(request, now)
        except (RequestError, QueueFullError):
            self.scheduler.stats.num_rejected += 1
            raise
        if matcher is not None:
            self.scheduler.add(request, now, matcher)

    def _add_compiled(self) -> None:
        """Add the requests whose grammars are ready, in the order of their arrival, or refuse them."""
        if self._structured_output is None:
            return
        for outcome in self._structured_output.poll():
            with self._refusing(outcome.request.request_id):
                if outcome.error is not None:
                    self.scheduler.stats.num_rejected += isinstance(outcome.error, RequestError)
                    raise outcome.error
                # It was accepted when it arrived: that the queue has filled since is no reason to refuse it.
                self.scheduler.add(replace(outcome.request, has_place=True), outcome.arrival_s, outcome.matcher)

    def _abort(self, request_id: int) -> None:
        event = self.scheduler.abort(request_id, self._clock())
        manager = self._structured_output
        if event is None and manager is not None and manager.abort(request_id):
            event = TokenEvent(request_id, finish_reason=FinishReason.ABORT)
        if event is not None:
            self._outbox.append(event)

    def _fail(self, request_id: int) -> TokenEvent:
        """End one request by the engine's fault, whether the scheduler knows it or not."""
        event = self.scheduler.fail(request_id, INTERNAL, self._clock())
        if event is None:
            self.scheduler.stats.num_errors += 1
            event = TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)
        return event

    def snapshot(self) -> EngineStats:
        self._count_pending()
        stats = self.scheduler.refresh_gauges()
        stats.uptime_s = self._clock() - self._started_s
        return stats

    # -- outbox

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []
        for chunk in messages.chunks(outbox):
            try:
                frame = messages.events(chunk)
            except Exception:
                logger.exception("event=encode_failed")
                frame = messages.events([self._sendable(event) for event in chunk])
            self._frame_socket.send(frame)

    def _sendable(self, event: TokenEvent) -> TokenEvent:
        """`event`, or the failure of its request when it cannot be encoded."""
        try:
            messages.events([event])
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=send", event.request_id)
            return self._fail(event.request_id)
        return event

    # -- idle

    def _may_go_on(self) -> bool:
        """After a turn without a step: whether to try another. If two in a row have none, fail all open requests."""
        if not self.scheduler.has_work:
            return False
        if not self._was_stuck:
            self._was_stuck = True
            return True
        counts = (self.scheduler.num_running, self.scheduler.num_waiting)
        logger.error("event=scheduler_stuck running=%d waiting=%d", *counts)
        self._outbox += self.scheduler.fail_all(INTERNAL, self._clock())
        self._send_outbox()
        return False

    def _wait(self) -> None:
        """Block until the socket is ready, a rank ends, a signal comes or a heartbeat is due."""
        now = self._clock()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._frame_socket.has_pending else 0)
        self._selector.modify(self._frame_socket, wanted, "socket")
        for key, ready in self._selector.select(max(0.0, self._next_beat_s - now)):
            if key.data == "wake":
                os.read(key.fd, 4096)
            elif key.data == "death":
                self._executor.ping()  # raises an error that names the rank
                raise WorkerError(-1, self.scheduler.stats.step_id, "the channel of a rank was closed")
            elif ready & selectors.EVENT_WRITE:
                self._frame_socket.flush()
        if self._clock() >= self._next_beat_s:
            self._beat()

    def _beat(self) -> None:
        """Check that every rank answers, and report it to the frontend."""
        self.busy_since = self._clock()
        self._executor.ping()
        self.busy_since = None
        self._next_beat_s = self._clock() + self._interval_s
        self._frame_socket.send(messages.alive(self.scheduler.stats.step_id))

    # -- the end

    def _die(self, cause: str, exit_code: int) -> int:
        """Tell the frontend first that the engine is dead, then end each request."""
        self.scheduler.stats.state = "dead"
        try:
            self._send_outbox()
            self._frame_socket.send(messages.dead(cause, exit_code))
            self._shut_down(DEAD)
        except FrameSocketClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
        return exit_code

    def _shut_down(self, message: str) -> None:
        """End every open request, and send what the frontend reads within `_DRAIN_S`."""
        self.busy_since = None
        self._outbox += self.engine_core.take_events() + self.scheduler.fail_all(message, self._clock())
        manager = self._structured_output
        for request_id in [] if manager is None else manager.abort_all():
            self._outbox.append(TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=message))
        self._send_outbox()
        drain_deadline = time.monotonic() + _DRAIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._frame_socket, selectors.EVENT_WRITE)
            while self._frame_socket.has_pending and (left := drain_deadline - time.monotonic()) > 0:
                selector.select(left)
                self._frame_socket.flush()


def _facts(error: WorkerError) -> tuple[int, int, bool, str]:
    return error.rank, error.step_id, error.hung, error.cause
