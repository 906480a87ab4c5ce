"""Record of each request's history, kept while it is open and some time after its end: times, counts and ids, no
tokens.

The scheduler, the statistics, the live state, `GET /v1/requests/{id}` and traces all read it. Each record is bounded,
and so is their number. The cost per step is a few sums (`StepLog`): the steps in which a request took part are the
difference of two readings of these sums.
"""

from collections import OrderedDict
from typing import cast

from oarlock.engine.scheduler.step_cost import StepLog, difference
from oarlock.engine.stats import (
    AWAITS_LOAD,
    AWAITS_SLOT,
    AdapterHistory,
    AdapterWait,
    Chunk,
    DecodeSteps,
    EngineStats,
    Preemption,
    RequestHistory,
    StallState,
)
from oarlock.engine.types import FinishReason

MAX_ENDED = 1000
MAX_AHEAD = 5
_MAX_CHUNKS, _MAX_PREEMPTIONS, _MAX_STALLS, _MAX_WAITS = 32, 16, 16, 16


class RequestLog:
    """Log of one engine: its statistics, its steps, and the timelines of recently ended requests."""

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self.steps = StepLog()
        self.ended: OrderedDict[int, RequestTimeline] = OrderedDict()


_NO_LOG = RequestLog(EngineStats())


class AdapterWaits:
    """Waits of one request for its LoRA adapter: their seconds, for loads and for slots, and the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seconds = {AWAITS_LOAD: 0.0, AWAITS_SLOT: 0.0}
        self._first: list[AdapterWait] = []
        self._awaited: str | None = None
        self._since_s = 0.0

    def change(self, awaited: str | None, now: float) -> None:
        """End the present wait, and begin a wait for `awaited`; None: the request does not wait for its adapter."""
        if awaited == self._awaited:
            return
        if self._awaited is not None:
            self._seconds[self._awaited] += now - self._since_s
            if self._first[-1]["end_s"] is None:
                self._first[-1]["end_s"] = now
        self._awaited, self._since_s = awaited, now
        if awaited is not None and len(self._first) < _MAX_WAITS:
            self._first.append(AdapterWait(awaited=awaited, at_s=now, end_s=None))

    @property
    def total_s(self) -> float:
        """Seconds of all waits that have ended."""
        return sum(self._seconds.values())

    def history(self) -> AdapterHistory:
        load_s, slot_s = self._seconds[AWAITS_LOAD], self._seconds[AWAITS_SLOT]
        waits = [wait.copy() for wait in self._first]
        return AdapterHistory(name=self._name, load_s=load_s, slot_s=slot_s, waits=waits)


class RequestTimeline:
    """Timeline of one request from its arrival on. All times are in seconds of the engine's clock."""

    def __init__(self, request_id: int, prompt_tokens: int, arrival_s: float, adapter: str | None = None) -> None:
        """Begin the timeline of a request with `adapter`, the name of a LoRA adapter."""
        self._log = _NO_LOG
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.arrival_s = arrival_s
        self.num_running = self.num_waiting = 0  # numbers of other requests at its arrival
        self.ahead: tuple[int, ...] = ()  # ids of the first of them
        # Steps in which the head of the queue found no row, or too few blocks: totals at arrival, later the counts
        # while this request waited.
        self._blocked = 0, 0
        self._adapter = None if adapter is None else AdapterWaits(adapter)
        self.first_scheduled_s: float | None = None
        self.cached_tokens = 0  # cached prompt tokens when it first ran
        self._chunks: list[tuple[float, int, int, int]] = []
        self._num_chunks = self._num_computed = 0
        self._preemptions: list[tuple[float, float | None, bool]] = []
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self._at_first_token: tuple[float, ...] = ()
        self.end_s: float | None = None
        self._at_end: tuple[float, ...] = ()
        self.reason: FinishReason | None = None
        self.output_tokens = 0
        self._stalls: list[StallState] = []

    def arrived(self, log: RequestLog, num_running: int, num_waiting: int, ahead: tuple[int, ...]) -> None:
        """Record that the request was accepted, behind the waiting requests or, without any, next to the running
        ones."""
        self._log, steps, stats = log, log.steps, log.stats
        self._blocked = steps.without_row, steps.without_blocks
        self.num_running, self.num_waiting, self.ahead = num_running, num_waiting, ahead
        stats.num_accepted += 1
        stats.prompt_tokens += self.prompt_tokens
        stats.request_prompt_tokens.observe(self.prompt_tokens)

    def awaits_adapter(self, awaited: str | None, now: float) -> None:
        """Record the memory that the request's adapter waits for: `AWAITS_LOAD`, `AWAITS_SLOT`, or None."""
        if self._adapter is not None:
            self._adapter.change(awaited, now)

    def admitted(self, now: float, num_cached: int) -> None:
        """Record that the request begins to run, or to run again, with `num_cached` cached tokens."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s, self.cached_tokens = now, num_cached
            self._blocked = self._blocked_since_arrival()
            stats = self._log.stats
            stats.queue_time_s.observe(now - self.arrival_s)
            if self._adapter is not None:
                stats.adapter_wait_s.observe(self._adapter.total_s)
            stats.prefix_cache_queries += self.prompt_tokens
            stats.prefix_cache_hits += num_cached
        elif self._preemptions and self.num_preemptions == len(self._preemptions):
            at_s, _, is_short = self._preemptions[-1]
            self._preemptions[-1] = at_s, now, is_short

    def computed(self, now: float, step_id: int, num_tokens: int, num_decodes: int) -> None:
        """Record a step that computes `num_tokens` of the prompt together with `num_decodes` decodes."""
        self._num_chunks += 1
        self._num_computed += num_tokens
        if len(self._chunks) < _MAX_CHUNKS:
            self._chunks.append((now, step_id, num_tokens, num_decodes))

    def preempted(self, now: float, *, is_short: bool) -> None:
        """Record a preemption. `is_short`: there were too few blocks; otherwise it makes room for other clients."""
        self._log.stats.num_preemptions += 1
        self.num_preemptions += 1
        if len(self._preemptions) < _MAX_PREEMPTIONS:
            self._preemptions.append((now, None, is_short))

    def got_first_token(self, now: float) -> None:
        assert self.first_scheduled_s is not None
        self.first_token_s = now
        self._at_first_token = self._log.steps.read()
        stats = self._log.stats
        stats.generation_tokens += 1
        stats.time_to_first_token_s.observe(now - self.arrival_s)
        stats.prefill_time_s.observe(now - self.first_scheduled_s)

    def ended(self, now: float, reason: FinishReason, output_tokens: int, *, is_pooled: bool) -> None:
        """Record the end. Times of aborted and failed requests are not counted, because they do not measure speed."""
        self.end_s, self.reason, self.output_tokens = now, reason, output_tokens
        self.awaits_adapter(None, now)
        if self.first_scheduled_s is None:
            self._blocked = self._blocked_since_arrival()
        self._at_end = self._log.steps.read()
        self._stalls = self._stalls_so_far()
        ended, stats = self._log.ended, self._log.stats
        ended[self.request_id] = self
        if len(ended) > MAX_ENDED:
            ended.popitem(last=False)
        stats.finished[reason.value] += 1
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        stats.e2e_latency_s.observe(now - self.arrival_s)
        if not is_pooled:
            stats.request_generation_tokens.observe(output_tokens)
        if self.first_token_s is not None:
            stats.decode_time_s.observe(now - self.first_token_s)
            if output_tokens > 1:
                stats.time_per_output_token_s.observe((now - self.first_token_s) / (output_tokens - 1))

    def history(self, output_tokens: int, queue_position: int | None = None) -> RequestHistory:
        """Return the record as it is sent. `output_tokens`: tokens generated so far. `queue_position`: requests before
        it."""
        waits = self.first_scheduled_s is None and self.end_s is None
        without_row, without_blocks = self._blocked_since_arrival() if waits else self._blocked
        return RequestHistory(
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output_tokens,
            arrival_s=self.arrival_s,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            queue_position=queue_position,
            ahead=list(self.ahead),
            without_row=without_row,
            without_blocks=without_blocks,
            adapter=None if self._adapter is None else self._adapter.history(),
            first_scheduled_s=self.first_scheduled_s,
            num_chunks=self._num_chunks,
            computed_tokens=self._num_computed,
            chunks=[
                Chunk(at_s=at, step=step, tokens=tokens, beside=beside) for at, step, tokens, beside in self._chunks
            ],
            first_token_s=self.first_token_s,
            decode=self._decode_steps(),
            num_preemptions=self.num_preemptions,
            preemptions=[Preemption(at_s=at, back_s=back, is_short=short) for at, back, short in self._preemptions],
            stalls=self._stalls_so_far() if self.end_s is None else self._stalls,
            end_s=self.end_s,
            reason=None if self.reason is None else self.reason.value,
        )

    def _blocked_since_arrival(self) -> tuple[int, int]:
        steps, (without_row, without_blocks) = self._log.steps, self._blocked
        return steps.without_row - without_row, steps.without_blocks - without_blocks

    def _stalls_so_far(self) -> list[StallState]:
        stalls = self._log.steps.stalls_since(self.arrival_s, _MAX_STALLS)
        return [cast(StallState, stall._asdict()) for stall in stalls]

    def _decode_steps(self) -> DecodeSteps | None:
        if not self._at_first_token:
            return None
        last = self._at_end or self._log.steps.read()
        steps, sequences, prompt_tokens, seconds, sizes = difference(self._at_first_token, last)
        return DecodeSteps(
            steps=steps,
            mean_sequences=round(sequences / steps, 2) if steps else 0.0,
            prompt_tokens=prompt_tokens,
            seconds=seconds,
            by_sequences=sizes,
        )
