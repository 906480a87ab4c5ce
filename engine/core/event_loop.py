"""The loop: drain the inbox, take a step, send what it did. Idle means blocked in one select, with a heartbeat.

A mistake with one request ends that request. A lost rank ends every request, each with one clear event, and the loop.
Does not know asyncio, HTTP or text; never waits for the frontend to read.
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
from engine.ipc.frame_socket import FrameSocket, LinkClosedError
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

_LAST_WORDS_S = 2.0


class EngineLoop:
    """Owns the step and the link. `run` returns the process's exit code; the group is left for the caller to close."""

    def __init__(
        self,
        config: EngineConfig,
        group: "Executor",
        link: FrameSocket,
        *,
        grammars: "StructuredOutputManager | None" = None,
        wake_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stepper = EngineCore(config, group, clock)
        self.scheduler = self.stepper.scheduler
        self.busy_since: float | None = None  # read by a watchdog thread: when the running step or ping began
        self._group = group
        self._link = link
        self._grammars = grammars
        self._clock = clock
        self._interval_s = config.heartbeat_interval_s
        self._started_s = clock()
        self._next_beat_s = self._started_s + self._interval_s
        # Ranks in processes of their own compute while events are sent; an inline rank computes inside `submit`.
        self._sends_during_step = bool(group.rank_pids)
        self._request_reader = messages.RequestReader()
        self._outbox: list[TokenEvent] = []
        self._stopping = False
        self._was_stuck = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ, "link")
        for fd in group.fileno_for_death():
            self._selector.register(fd, selectors.EVENT_READ, "death")
        if grammars is not None:
            self._selector.register(grammars, selectors.EVENT_READ, "grammars")
        if wake_fd is not None:
            os.set_blocking(wake_fd, False)
            self._selector.register(wake_fd, selectors.EVENT_READ, "wake")

    def stop(self) -> None:
        """Leave the loop after the step in flight. May be called from a signal handler."""
        self._stopping = True

    def run(self) -> int:
        """Until told to stop, or until the frontend or a rank is gone."""
        try:
            while not self._stopping:
                if not self.tick() and not self._stopping:
                    self._wait()
            self._part(STOPPING)
            return EXIT_OK
        except LinkClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
            return EXIT_OK
        except WorkerError as error:
            logger.error('event=rank_lost rank=%d step=%d hung=%s cause="%s"', *_facts(error))
            return self._die(str(error), EXIT_RANK_HUNG if error.hung else EXIT_RANK_DIED)
        except Exception as error:
            logger.exception("event=engine_failed")
            return self._die(f"the engine loop failed: {type(error).__name__}", EXIT_BUG)

    def tick(self) -> bool:
        """One turn: inbox, step, outbox. False when there is nothing to compute now."""
        self._receive()
        if self._stopping or self._link.is_full:
            return False
        self.busy_since = self._clock()
        output = self.stepper.begin()
        self._outbox += self.stepper.take_events()
        self._send_outbox()
        if output is None:
            self.busy_since = None
            return self._may_go_on()
        self._was_stuck = False
        self._outbox += self.stepper.finish(output)
        now = self._clock()
        self.busy_since = None
        self._next_beat_s = now + self._interval_s
        if not self._outbox:
            self._link.send(messages.alive(output.step_id))
        if not self._sends_during_step:
            self._send_outbox()
        return True

    # -- inbox

    def _receive(self) -> None:
        for frame in self._link.receive():
            self._handle(frame)
        self._let_in()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == "request":
            self._add(frame)
        elif frame.kind == "abort":
            self._abort(messages.read_id(frame))
        elif frame.kind == "stats":
            self._link.send(messages.stats(messages.read_number(frame), self.snapshot()))
        elif frame.kind == "reset_cache":
            num_blocks = self.scheduler.kv_cache_manager.reset_prefix_cache()
            self._link.send(messages.cache_reset(messages.read_number(frame), num_blocks))
        elif frame.kind == "stop":
            self.stop()
        else:
            raise FrameError(f"the frontend sent a {frame.kind!r} frame")

    def _add(self, frame: Frame) -> None:
        with self._at_the_door(messages.read_id(frame)):
            request = self._request_reader.read(frame)
            self._count_parked()
            if request.params.grammar is None:
                self.scheduler.add(request, self._clock())
            else:
                self._add_with_grammar(request, self._clock())

    def _count_parked(self) -> None:
        if self._grammars is not None:
            self.scheduler.set_pending(self._grammars.num_parked, self._grammars.num_parked_tokens)

    @contextmanager
    def _at_the_door(self, request_id: int) -> Generator[None]:
        """Who cannot come in hears why, and nobody else does."""
        try:
            yield
        except (RequestError, QueueFullError) as error:
            self._link.send(messages.refused(request_id, error))
        except UnavailableError as error:
            self.scheduler.stats.num_errors += 1
            self._link.send(messages.refused(request_id, error))
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=add", request_id)
            self._outbox.append(self._fail(request_id))

    def _add_with_grammar(self, request: Request, now: float) -> None:
        """Who needs a grammar that nobody has asked for before waits at the desk, and holds up nobody."""
        if self._grammars is None:
            raise RequestError("This engine was started without grammars.", "structured_outputs")
        self.scheduler.check(request, now)
        try:
            state = self._grammars.enter(request, now)
        except (RequestError, QueueFullError):
            self.scheduler.stats.num_rejected += 1
            raise
        if state is not None:
            self.scheduler.add(request, now, state)

    def _let_in(self) -> None:
        """Whoever waited for a grammar comes in by the time of arrival, or hears what is wrong with it."""
        if self._grammars is None:
            return
        for outcome in self._grammars.take():
            with self._at_the_door(outcome.request.request_id):
                if outcome.error is not None:
                    self.scheduler.stats.num_rejected += isinstance(outcome.error, RequestError)
                    raise outcome.error
                # It was let in when it came: that the queue has filled since is no reason to refuse it.
                self.scheduler.add(replace(outcome.request, has_place=True), outcome.arrival_s, outcome.state)

    def _abort(self, request_id: int) -> None:
        event = self.scheduler.abort(request_id, self._clock())
        if event is None and self._grammars is not None and self._grammars.abort(request_id):
            event = TokenEvent(request_id, finish_reason=FinishReason.ABORT)
        if event is not None:
            self._outbox.append(event)

    def _fail(self, request_id: int) -> TokenEvent:
        """One request ends by our fault, known to the scheduler or not."""
        event = self.scheduler.fail(request_id, INTERNAL, self._clock())
        if event is None:
            self.scheduler.stats.num_errors += 1
            event = TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)
        return event

    def snapshot(self) -> EngineStats:
        self._count_parked()
        stats = self.scheduler.refresh_gauges()
        stats.uptime_s = self._clock() - self._started_s
        return stats

    # -- outbox

    def _send_outbox(self) -> None:
        outbox, self._outbox = self._outbox, []
        for group in messages.chunks(outbox):
            try:
                frame = messages.events(group)
            except Exception:
                logger.exception("event=encode_failed")
                frame = messages.events([self._sendable(event) for event in group])
            self._link.send(frame)

    def _sendable(self, event: TokenEvent) -> TokenEvent:
        """`event`, or the end of its request when it cannot be written."""
        try:
            messages.events([event])
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=send", event.request_id)
            return self._fail(event.request_id)
        return event

    # -- idle

    def _may_go_on(self) -> bool:
        """After a turn without a step: whether the next may have one. Work that nobody can run is our own mistake."""
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
        """Block until the frontend speaks or reads, a rank ends, a signal comes or a heartbeat is due."""
        now = self._clock()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.has_pending else 0)
        self._selector.modify(self._link, wanted, "link")
        for key, ready in self._selector.select(max(0.0, self._next_beat_s - now)):
            if key.data == "wake":
                os.read(key.fd, 4096)
            elif key.data == "death":
                self._group.ping()  # which says who it was
                raise WorkerError(-1, self.scheduler.stats.step_id, "the channel of a rank was closed")
            elif ready & selectors.EVENT_WRITE:
                self._link.flush()
        if self._clock() >= self._next_beat_s:
            self._beat()

    def _beat(self) -> None:
        """An idle engine still proves that every rank answers."""
        self.busy_since = self._clock()
        self._group.ping()
        self.busy_since = None
        self._next_beat_s = self._clock() + self._interval_s
        self._link.send(messages.alive(self.scheduler.stats.step_id))

    # -- the end

    def _die(self, cause: str, exit_code: int) -> int:
        """The frontend hears first that nothing more will come, then of each request's end."""
        self.scheduler.stats.state = "dead"
        try:
            self._send_outbox()
            self._link.send(messages.dead(cause, exit_code))
            self._part(DEAD)
        except LinkClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
        return exit_code

    def _part(self, message: str) -> None:
        """Every open request gets its terminal event, as far as the frontend still reads."""
        self.busy_since = None
        self._outbox += self.stepper.take_events() + self.scheduler.fail_all(message, self._clock())
        for request_id in [] if self._grammars is None else self._grammars.abort_all():
            self._outbox.append(TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=message))
        self._send_outbox()
        deadline = time.monotonic() + _LAST_WORDS_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_WRITE)
            while self._link.has_pending and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self._link.flush()


def _facts(error: WorkerError) -> tuple[int, int, bool, str]:
    return error.rank, error.step_id, error.hung, error.cause
