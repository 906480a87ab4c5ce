"""Traces of open and recently ended requests: times, counts and ids, never tokens.

Each trace is bounded, and so are all together. A step pays only for a few sums (`step_log.py`).
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from oarlock.engine.scheduler.step_cost import Stall, StepLog, between
from oarlock.engine.stats import Chunk, DecodeSteps, Preemption, RequestHistory, StallState
from oarlock.engine.types import FinishReason

MAX_ENDED = 1000
_MAX_AHEAD, _MAX_CHUNKS, _MAX_PREEMPTIONS, _MAX_STALLS = 5, 32, 16, 16


_NO_STEPS = StepLog()


class HasRequestId(Protocol):
    """Object with a request id."""

    request_id: int


class Requests(Protocol):
    """Sized sequence of requests in their order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[HasRequestId]: ...


class RequestTrace:
    """Trace of one request from its arrival on. All times are those of the engine's clock, in seconds."""

    __slots__ = (
        "_at_first_token",
        "_chunks",
        "_num_chunks",
        "_num_computed",
        "_preemptions",
        "_stalls",
        "ahead",
        "arrival_s",
        "at_end",
        "blocked",
        "cached_tokens",
        "end_s",
        "first_scheduled_s",
        "first_token_s",
        "num_preemptions",
        "num_running",
        "num_waiting",
        "output_tokens",
        "prompt_tokens",
        "reason",
        "request_id",
        "steps",
    )

    def __init__(self, request_id: int, prompt_tokens: int, arrival_s: float) -> None:
        self.steps = _NO_STEPS  # the step log of its engine
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.arrival_s = arrival_s
        self.num_running = self.num_waiting = 0  # other requests, when it arrived
        self.ahead: tuple[int, ...] = ()  # ids of the first of these
        self.blocked = (
            0,
            0,
        )  # steps in which the next in turn found no row, or too few blocks: ever, then while it waited
        self.first_scheduled_s: float | None = None
        self.cached_tokens = 0
        self._chunks: list[tuple[float, int, int, int]] = []
        self._num_chunks = self._num_computed = 0
        self._preemptions: list[tuple[float, float | None, bool]] = []
        self.num_preemptions = 0
        self.first_token_s: float | None = None
        self._at_first_token: tuple[float, ...] = ()
        self.end_s: float | None = None
        self.at_end: tuple[float, ...] = ()
        self.reason: FinishReason | None = None
        self.output_tokens = 0
        self._stalls: list[Stall] = []

    def admitted(self, now: float, num_cached: int) -> None:
        """Record that the request begins to run, or to run again, with `num_cached` cached tokens."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s, self.cached_tokens = now, num_cached
            self.blocked = self._blocked_since_arrival()
        elif self._preemptions and self.num_preemptions == len(self._preemptions):
            at_s, _, is_short = self._preemptions[-1]
            self._preemptions[-1] = at_s, now, is_short

    def computed(self, now: float, step_id: int, num_tokens: int, num_decodes: int) -> None:
        """Record a step that computes `num_tokens` of the prompt, beside `num_decodes` sequences that decode."""
        self._num_chunks += 1
        self._num_computed += num_tokens
        if len(self._chunks) < _MAX_CHUNKS:
            self._chunks.append((now, step_id, num_tokens, num_decodes))

    def preempted(self, now: float, *, is_short: bool) -> None:
        """Record a preemption. `is_short`: there were too few blocks; else it makes room for other clients."""
        self.num_preemptions += 1
        if len(self._preemptions) < _MAX_PREEMPTIONS:
            self._preemptions.append((now, None, is_short))

    def got_first_token(self, now: float) -> None:
        self.first_token_s = now
        self._at_first_token = self.steps.read()

    def ended(self, now: float, reason: FinishReason, output_tokens: int) -> None:
        self.end_s, self.reason, self.output_tokens = now, reason, output_tokens
        if self.first_scheduled_s is None:
            self.blocked = self._blocked_since_arrival()
        self.at_end = self.steps.read()
        self._stalls = self.steps.stalls_since(self.arrival_s, _MAX_STALLS)

    def history(self, output_tokens: int) -> RequestHistory:
        """The trace as it is sent. `output_tokens`: generated so far, of a request that has not ended."""
        has_ended = self.end_s is not None
        without_row, without_blocks = self.blocked
        if self.first_scheduled_s is None and not has_ended:
            without_row, without_blocks = self._blocked_since_arrival()
        stalls = self._stalls if has_ended else self.steps.stalls_since(self.arrival_s, _MAX_STALLS)
        return RequestHistory(
            request_id=self.request_id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens if has_ended else output_tokens,
            arrival_s=self.arrival_s,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            ahead=list(self.ahead),
            without_row=without_row,
            without_blocks=without_blocks,
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
            stalls=[_sent(stall) for stall in stalls],
            end_s=self.end_s,
            reason=None if self.reason is None else self.reason.value,
        )

    def _blocked_since_arrival(self) -> tuple[int, int]:
        return self.steps.without_row - self.blocked[0], self.steps.without_blocks - self.blocked[1]

    def _decode_steps(self) -> DecodeSteps | None:
        if not self._at_first_token:
            return None
        last = self.at_end or self.steps.read()
        steps, sequences, prompt_tokens, seconds, sizes = between(self._at_first_token, last)
        return DecodeSteps(
            steps=steps,
            mean_sequences=round(sequences / steps, 2) if steps else 0.0,
            prompt_tokens=prompt_tokens,
            seconds=seconds,
            by_sequences=sizes,
        )


def _sent(stall: Stall) -> StallState:
    return StallState(
        kind=stall.kind,
        begun_s=stall.begun_s,
        seconds=stall.seconds,
        num_sequences=stall.num_sequences,
        num_prompt_tokens=stall.num_prompt_tokens,
    )


class RequestTraces:
    """Traces of one scheduler's requests."""

    def __init__(self) -> None:
        self.steps = StepLog()
        self.now_s = 0.0  # time of the step that is being decided
        self._ended: OrderedDict[int, RequestTrace] = OrderedDict()

    def open(self, trace: RequestTrace, running: Requests, waiting: Requests) -> None:
        """Begin the trace of a request that arrives, behind those that wait, or else beside those that run."""
        trace.steps = self.steps
        trace.blocked = self.steps.without_row, self.steps.without_blocks
        trace.num_running, trace.num_waiting = len(running), len(waiting)
        trace.ahead = tuple(one.request_id for one in islice(waiting if len(waiting) else running, _MAX_AHEAD))

    def close(self, trace: RequestTrace, now: float, reason: FinishReason, output_tokens: int) -> None:
        """End the trace of a request and keep it among the newest ended ones."""
        trace.ended(now, reason, output_tokens)
        self._ended[trace.request_id] = trace
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def find(self, request_id: int) -> RequestTrace | None:
        """Find the trace of a request that has ended recently."""
        return self._ended.get(request_id)
