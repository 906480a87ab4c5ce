"""The engine's loop: reads frames, runs steps, sends events. An idle engine waits in `select`, with a heartbeat.

An exception with one request ends that request. A lost rank ends every request, each with one event, and the loop. Does
not know asyncio, HTTP or text; never waits for the frontend to read.
"""

import logging
import selectors
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from oarlock.base.errors import EXIT_BUG, EXIT_OK
from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore, history, live_state
from oarlock.engine.errors import INTERNAL, QueueFullError, RequestError, UnavailableError
from oarlock.engine.input_batch.sampling_metadata import fill_one_by_one
from oarlock.engine.ipc import messages
from oarlock.engine.ipc.frames import FrameError, FrameSocket, FrameSocketClosedError
from oarlock.engine.kv_cache.block_events import BlockChanges, BlockEvent, BlockEventLog
from oarlock.engine.kv_cache.offload import Flush
from oarlock.engine.lora.registry import POLL_S, UNLOADED
from oarlock.engine.scheduler.adapter_queue import AdapterQueue, unloaded
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason, Request, TokenEvent, TokenEvents
from oarlock.workers.errors import WorkerError

if TYPE_CHECKING:
    from oarlock.engine.kv_cache.publisher import KvEventPublisher
    from oarlock.engine.structured_output.manager import StructuredOutputManager
    from oarlock.workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

ENGINE_DEAD = (
    "The inference engine stopped while this request was running. No request can be served until it is restarted."
)
SERVER_STOPPING = "The server is shutting down; this request was not completed."

_DRAIN_S = 2.0  # time to send the last events to a frontend that reads slowly
FLUSH_S = 3.0  # time to write cached blocks to files; the frontend waits a little longer for the end of this process


class EngineLoop:
    """Owns the steps and the socket. `run` returns the process's exit code; the caller closes the executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: "Executor",
        frame_socket: FrameSocket,
        *,
        structured_output: "StructuredOutputManager | None" = None,
        kv_events: "KvEventPublisher | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        fill_masks = fill_one_by_one if structured_output is None else structured_output.fill_masks
        self.engine_core = EngineCore(config, executor, clock, fill_masks)
        self.scheduler = self.engine_core.scheduler
        self._executor = executor
        self._frame_socket = frame_socket
        self._structured_output = structured_output
        self._clock = clock
        self._interval_s = config.heartbeat_interval_s
        self._started_s = clock()
        self._next_beat_s = self._started_s + self._interval_s
        self._request_reader = messages.RequestReader()
        self._outbox: list[TokenEvents] = []  # ordered by time; each becomes one or more frames
        self._block_subscribers: list[Callable[[list[BlockEvent]], None]] = []
        self._block_pool = self.scheduler.memory.leader.pool
        self._kv_events = kv_events
        if kv_events is not None:
            self.subscribe_to_blocks(kv_events.publish)
        if config.reports_blocks:
            self.subscribe_to_blocks(self._report_blocks)
        self._adapters = self.scheduler.adapters
        self._awaited_adapters: dict[str, list[int]] = {}  # name -> numbers of the messages that wait for its load
        self._state_queries: list[int] = []  # numbers of the state queries that wait for a response
        self._stopping = False
        self.ending = "the server stopped normally"  # final when `run` has returned
        self._was_stuck = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(frame_socket, selectors.EVENT_READ, "socket")
        for fd in executor.fileno_for_death():
            self._selector.register(fd, selectors.EVENT_READ, "death")
        if executor.kv_reports is not None:
            self._selector.register(executor.kv_reports, selectors.EVENT_READ, "kv_reports")
        if structured_output is not None:
            self._selector.register(structured_output, selectors.EVENT_READ, "structured_output")

    def subscribe_to_blocks(self, subscriber: Callable[[list[BlockEvent]], None]) -> None:
        """Call `subscriber` with the events of the prefix cache, in order and from the first one on.

        It is called once per turn that has events, while the ranks compute, and must return at once. Allowed only
        before `run`. Without a subscriber no events are kept.
        """
        pool = self._block_pool
        pool.event_log = pool.event_log or BlockEventLog()
        self._block_subscribers.append(subscriber)

    def stop(self) -> None:
        """Leave the loop after the step in flight."""
        self._stopping = True

    def run(self) -> int:
        """Run until `stop`, or until the frontend or a rank is gone. Return the exit code."""
        try:
            while not self._stopping:
                if not self.tick() and not self._stopping:
                    self._wait()
            self._shut_down(SERVER_STOPPING)
            self._flush()
            return EXIT_OK
        except FrameSocketClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
            self.ending = f"the server's frontend disconnected: {error}"
            return EXIT_OK
        except WorkerError as error:
            logger.error('event=rank_lost rank=%d step=%d hung=%s cause="%s"', *_error_fields(error))
            return self._report_death(str(error), error.exit_code)
        except Exception as error:
            logger.exception("event=engine_failed")
            return self._report_death(f"the engine loop failed: {type(error).__name__}", EXIT_BUG)

    def tick(self) -> bool:
        """Run one turn: inbox, the next step, outbox, an output of the ranks.

        Return False if nothing can be computed now; then no step is in flight.
        """
        core = self.engine_core
        for payload in self._frame_socket.receive():
            self._handle(messages.read_from_frontend(payload))
        if self._structured_output is not None and self._structured_output.waiting:
            self._add_compiled(self._structured_output)
        if self._executor.kv_reports is not None:
            core.receive_reports()
        if self._adapters is not None and self._adapters.registry.outcomes:
            self._reply_to_loads(self._adapters)
        if self._stopping or self._frame_socket.is_full:
            while core.num_in_flight:
                self._finish_step()
            return False
        output = core.begin()
        if core.ended:
            self._post(core.take_events())
        if self._outbox:
            self._send_outbox()  # the ranks compute meanwhile, and need masks only when they sample
        if core.masks is not None:
            core.send_masks()
        if self._block_subscribers:
            self._publish_blocks()
        if self._state_queries:
            self._send_state()
        num_in_flight = core.num_in_flight
        if output is None and not num_in_flight:
            return self._may_retry()
        self._was_stuck = False
        if output is None or num_in_flight >= core.depth:
            self._finish_step()
        return True

    def _finish_step(self) -> None:
        """Wait for the output of the oldest step in flight."""
        events = self.engine_core.finish()
        self._next_beat_s = self._clock() + self._interval_s
        if events.request_ids or events.others:
            self._outbox.append(events)
        elif not self._outbox:
            self._send(messages.Alive(self.scheduler.stats.step_id))
        if self._outbox and self.engine_core.num_in_flight:
            self._send_outbox()
        if self.engine_core.masks is not None and self.engine_core.num_in_flight:
            self.engine_core.send_masks()

    # -- inbox

    def _handle(self, message: messages.FromFrontend) -> None:
        match message:
            case messages.Submit():
                self._add(message)
            case messages.Abort(request_id):
                self._abort(request_id)
            case messages.AskStats(number):
                self._send(messages.Stats(number, self.snapshot()))
            case messages.AskState(number):
                self._state_queries.append(number)
            case messages.AskHistories(number, request_ids):
                found = [history(self.scheduler, request_id) for request_id in request_ids]
                self._send(messages.Histories(number, [one for one in found if one is not None]))
            case messages.ResetCache(number):
                self._send(messages.CacheReset(number, self.scheduler.memory.reset_prefix_cache()))
            case messages.AddAdapter() | messages.RemoveAdapter():
                self._change_adapters(message)
            case messages.AskAdapters(number):
                adapters, sequences = self._adapters, self.scheduler.requests.by_id.values()
                self._send(messages.Adapters(number, [] if adapters is None else adapters.infos(sequences)))
            case messages.Stop():
                self.stop()
            case _:
                raise FrameError("the frontend sent a second configuration")

    def _add(self, message: messages.Submit) -> None:
        with self._refusing(message.request_id):
            request = self._request_reader.read(message)
            self._count_pending()
            if request.params.grammar is None:
                self.scheduler.add(request, self._clock())
            else:
                self._add_with_grammar(request, self._clock())

    def _count_pending(self) -> None:
        manager = self._structured_output
        if manager is not None:
            self.scheduler.set_pending(manager.pending_by_client)

    @contextmanager
    def _refusing(self, request_id: int) -> Generator[None]:
        """Send the refusal of a request that cannot be added. A bug in the engine ends only that request."""
        try:
            yield
        except (RequestError, QueueFullError) as error:
            self._send(messages.Refused.of(request_id, error))
        except UnavailableError as error:
            self.scheduler.stats.num_errors += 1
            self._send(messages.Refused.of(request_id, error))
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=add", request_id)
            self._post([self._fail(request_id)])

    def _add_with_grammar(self, request: Request, now: float) -> None:
        """Add a request with a grammar; it is pending in the manager until its grammar is compiled."""
        if self._structured_output is None:
            raise RequestError("This engine was started without grammar support.", "structured_outputs")
        self.scheduler.check(request, now)
        try:
            matcher = self._structured_output.submit(request, now)
        except (RequestError, QueueFullError):
            self.scheduler.stats.num_rejected += 1
            raise
        if matcher is not None:
            self.scheduler.add(request, now, matcher)

    def _add_compiled(self, manager: "StructuredOutputManager") -> None:
        """Add the requests whose grammars are ready, in the order of their arrival, or refuse them."""
        for outcome in manager.poll(self._clock()):
            with self._refusing(outcome.request.request_id):
                if outcome.error is not None:
                    self.scheduler.stats.num_rejected += isinstance(outcome.error, RequestError)
                    raise outcome.error
                # It was accepted when it arrived, and must not be refused because the queue has filled since.
                self.scheduler.add(replace(outcome.request, is_admitted=True), outcome.arrival_s, outcome.matcher)

    def _abort(self, request_id: int) -> None:
        event = self.scheduler.abort(request_id, self._clock())
        manager = self._structured_output
        if event is None and manager is not None and manager.abort(request_id):
            event = TokenEvent(request_id, finish_reason=FinishReason.ABORT)
        if event is not None:
            self._post([event])

    def _change_adapters(self, message: messages.AddAdapter | messages.RemoveAdapter) -> None:
        """Add or remove an adapter. The reply to an addition follows when it is loaded."""
        adapters, now = self._adapters, self._clock()
        try:
            if adapters is None:
                raise RequestError("This server serves no LoRA adapters.", "lora_name")
            self._reply_to_loads(adapters)  # ends of earlier loads are no replies to this message
            if isinstance(message, messages.AddAdapter):
                adapters.add(message.name, message.digest, message.directory, now)
                self._awaited_adapters.setdefault(message.name, []).append(message.number)
                return
            events = adapters.remove(message.name, list(self.scheduler.requests.by_id.values()), now)
            events += self._end_pending(message.name)
        except RequestError as error:
            self._send(messages.AdapterDone.refused(message.number, error))
            return
        self._post(events)
        self._send_outbox()
        self._reply_to_loads(adapters)
        self._send(messages.AdapterDone(message.number, len(events)))

    def _end_pending(self, adapter: str) -> list[TokenEvent]:
        """End the requests that wait for their grammar: `adapter` may get another content before they are added."""
        manager, reason, message = self._structured_output, FinishReason.ERROR, unloaded(adapter)
        return [
            TokenEvent(request_id, finish_reason=reason, error=message, error_param="model", error_code=UNLOADED)
            for request_id in ([] if manager is None else manager.abort_adapter(adapter))
        ]

    def _reply_to_loads(self, adapters: AdapterQueue) -> None:
        """Reply to additions of adapters whose loads have ended."""
        for name, error in adapters.registry.take_outcomes():
            for number in self._awaited_adapters.pop(name, []):
                done = messages.AdapterDone(number) if error is None else messages.AdapterDone.refused(number, error)
                self._send(done)

    def _fail(self, request_id: int) -> TokenEvent:
        """End one request through the engine's fault, whether the scheduler knows it or not."""
        event = self.scheduler.fail(request_id, INTERNAL, self._clock())
        if event is None:
            self.scheduler.stats.num_errors += 1
            event = TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)
        return event

    def snapshot(self) -> EngineStats:
        self._count_pending()
        stats = self.scheduler.refresh_gauges()
        stats.uptime_s = self._clock() - self._started_s
        if (publisher := self._kv_events) is not None:
            stats.num_kv_event_batches = publisher.num_sent
            stats.num_kv_event_batches_dropped = publisher.num_dropped
            stats.num_kv_event_overflows = publisher.num_overflows
        return stats

    # -- outbox

    def _send(self, message: messages.Message) -> None:
        self._frame_socket.send(messages.encode(message))

    def _post(self, events: list[TokenEvent]) -> None:
        """Append `events` to the outbox."""
        if events and not self._outbox:
            self._outbox.append(TokenEvents())
        if events:
            self._outbox[-1].others += events

    def _send_outbox(self) -> None:
        parts, outbox, self._outbox = self._outbox, self._outbox, []
        if len(outbox) != 1 or outbox[0].others:
            parts = list(chain.from_iterable(map(messages.chunks, outbox)))
        for chunk in parts:
            try:
                frame = messages.encode(messages.Events.of(chunk))
            except Exception:
                logger.exception("event=encode_failed")
                sendable = [self._sendable(event) for event in chunk.others]
                frame = messages.encode(messages.Events.of(replace(chunk, others=sendable)))
            self._frame_socket.send(frame)

    def _sendable(self, event: TokenEvent) -> TokenEvent:
        """Return `event`, or the failure of its request if it cannot be encoded."""
        try:
            messages.encode(messages.Events.of(TokenEvents(others=[event])))
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=send", event.request_id)
            return self._fail(event.request_id)
        return event

    def _publish_blocks(self) -> None:
        log = self._block_pool.event_log
        if log is not None and (events := log.take()):
            for subscriber in self._block_subscribers:
                subscriber(events)

    def _send_state(self) -> None:
        """Send the live state to all callers that asked, while the ranks compute, since it takes noticeable time."""
        self._count_pending()
        state = live_state(self.scheduler, self._clock())
        for number in self._state_queries:
            self._send(messages.State(number, state))
        self._state_queries.clear()

    def _report_blocks(self, events: list[BlockEvent]) -> None:
        self._send(messages.Blocks(*BlockChanges.of(events)))

    # -- idle

    def _may_retry(self) -> bool:
        """Return whether to try another turn after a turn without a step. After two such turns, fail all requests."""
        if not self.scheduler.has_work or self.scheduler.awaits_files:
            return False
        if not self._was_stuck:
            self._was_stuck = True
            return True
        counts = (self.scheduler.num_running, self.scheduler.num_waiting)
        logger.error("event=scheduler_stuck running=%d waiting=%d", *counts)
        self._post(self.scheduler.fail_all(INTERNAL, self._clock()))
        self._send_outbox()
        return False

    def _wait(self) -> None:
        """Block until the socket is ready, a rank ends or a heartbeat is due."""
        now = self._clock()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._frame_socket.has_pending else 0)
        self._selector.modify(self._frame_socket, wanted, "socket")
        until_s = self._next_beat_s
        if self._adapters is not None and self._adapters.is_loading:
            until_s = min(until_s, max(now + POLL_S, self._adapters.registry.next_poll_s))
        for key, ready in self._selector.select(max(0.0, until_s - now)):
            if key.data == "death":
                self._executor.ping()  # raises an error that names the rank
                raise WorkerError(-1, self.scheduler.stats.step_id, "the channel of a rank was closed")
            elif key.data == "structured_output" and self._structured_output is not None:
                self._add_compiled(self._structured_output)  # consumes the wake-up, even if no request waits any more
            elif ready & selectors.EVENT_WRITE:
                self._frame_socket.flush()
        if self._clock() >= self._next_beat_s:
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        """Check that every rank responds, and report it to the frontend."""
        self._executor.ping()
        self._next_beat_s = self._clock() + self._interval_s
        self._send(messages.Alive(self.scheduler.stats.step_id))

    # -- the end

    def _report_death(self, cause: str, exit_code: int) -> int:
        """Report to the frontend first that the engine is dead, then end each request."""
        self.ending = cause
        self.scheduler.stats.state = "dead"
        try:
            self._send_outbox()
            self._send(messages.Dead.of(cause, exit_code))
            self._shut_down(ENGINE_DEAD)
        except FrameSocketClosedError as error:
            logger.info('event=frontend_gone cause="%s"', error)
        return exit_code

    def _shut_down(self, message: str) -> None:
        """End every open request, and send the events that the frontend reads within `_DRAIN_S`."""
        self._post(self.engine_core.take_events() + self.scheduler.fail_all(message, self._clock()))
        manager = self._structured_output
        for request_id in [] if manager is None else manager.abort_all():
            self._post([TokenEvent(request_id, finish_reason=FinishReason.ERROR, error=message)])
        self._send_outbox()
        drain_deadline = time.monotonic() + _DRAIN_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._frame_socket, selectors.EVENT_WRITE)
            while self._frame_socket.has_pending and (left := drain_deadline - time.monotonic()) > 0:
                selector.select(left)
                self._frame_socket.flush()

    def _flush(self) -> None:
        """Write cached blocks to files, if there is a disk tier, for at most `FLUSH_S`."""
        stats, reports = self.scheduler.stats, self._executor.kv_reports
        offload = self.scheduler.kv_offload
        if reports is None or offload is None or not offload.has_disk:
            return
        while self.engine_core.num_in_flight:
            self.engine_core.finish()
        begun_s, num_before = self._clock(), stats.kv_offload_written_blocks
        flush = Flush(offload, self.scheduler.memory.cached_blocks())
        with selectors.DefaultSelector() as selector:
            selector.register(reports, selectors.EVENT_READ)
            while flush.add_copies() and (left_s := begun_s + FLUSH_S - self._clock()) > 0:
                if self.engine_core.begin() is not None:
                    self.engine_core.finish()
                else:
                    selector.select(left_s)
                self.engine_core.receive_reports()
        num_written, seconds = stats.kv_offload_written_blocks - num_before, self._clock() - begun_s
        logger.info("event=kv_flushed written=%d left=%d seconds=%.2f", num_written, flush.num_left, seconds)


def _error_fields(error: WorkerError) -> tuple[int, int, bool, str]:
    return error.rank, error.step_id, error.hung, error.cause
