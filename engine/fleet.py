"""Simulation of a trace on a fleet of replicas in virtual time: latencies of requests, and load of replicas.

A traced request has lengths and shared prefixes, and no text. A prompt's tokens are made when the request arrives, so a
trace of a hundred million tokens takes no memory.

A replica is the real scheduler with simulated ranks that only take time. One step is in flight at a time, as at a
pipeline depth of 1. Steps that would only give every running sequence one token are fast-forwarded: the scheduler gives
a sequence several tokens in one step, as drafts that are all accepted. A fast-forward ends when the first sequence
ends, and is cut short when a request arrives: later drafts then count as rejected. Its steps take as long as if they
ran one by one, and a test compares both. Only blocks differ: they are allocated for all its steps when it begins, and
if there are too few, steps are run one by one.

A router chooses a replica at random, by least load, or like our frontend. Its `choose` gets a request when the steps
of all replicas have been simulated up to the arrival. It returns the index of a replica, and the number of prompt
tokens that it knows to be cached there. It sees the present loads and caches, whereas a real router learns of them a
little later.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.errors import QueueFullError, RequestError
from oarlock.engine.kv_cache.manager import BlockChanges, BlockEventLog, KVCacheManager
from oarlock.engine.replicas import Load, PrefixIndex, choose
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.sequence import ModelRunnerOutput, SchedulerOutput
from oarlock.engine.scheduler.step_cost import REMEMBERED
from oarlock.engine.simulated_ranks import StepLoad, StepTime, replica_info
from oarlock.engine.spec_decode.drafter import Candidate, Drafter, RowCosts
from oarlock.engine.types import FinishReason, Request, SamplingParams, TokenEvent, TokenEvents
from oarlock.workers.capacity import Capacity
from oarlock.workers.config import StepCost, WorkerConfig, WorkerInfo
from oarlock.workers.protocol import FINITE, StepOutput

PERCENTILES = (50, 95, 99)
_BASE, _DIGITS = 250, 7  # Python keeps a single object for each integer up to 256
_FILL = 255
TOKEN = 254  # the id of every generated token
_NO_LOOKUP = SpeculativeConfig(num_speculative_tokens=1, prompt_lookup_max=1, prompt_lookup_min=1)
_REPORT_EVERY = 64  # requests
_PROMPT = 256  # tokens of the prompt used to compute the cost of one token


class Records:
    """Records of all replicas. Requests are named by their number in the trace."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.ttft_s: dict[int, float] = {}
        self.e2e_s: dict[int, float] = {}
        self.num_refused = 0
        self.num_tokens = 0  # generated tokens
        self.ended_s = 0.0  # time of the last end of a request
        self._last_s: dict[int, float] = {}  # time of a request's newest token
        self._gaps_s: list[float] = []  # gaps between tokens
        self._fast_forwards: list[tuple[np.ndarray, int]] = []  # gaps, and the number of requests that had them

    def tokens(self, events: TokenEvents, ends_s: np.ndarray) -> int:
        """Record the events of a step, or of a fast-forward whose steps ended at `ends_s`, float64 [steps].

        Returns the number of requests that ended with it.
        """
        now_s, last_s, gaps_s = float(ends_s[-1]), self._last_s, self._gaps_s
        self.num_tokens += len(events.request_ids)
        for number in events.request_ids:
            gaps_s.append(now_s - last_s[number])
            last_s[number] = now_s
        num_forwarded = 0
        for event in events.others:
            if not event.token_ids:
                continue
            number, first_s = event.request_id, float(ends_s[0] if len(event.token_ids) > 1 else now_s)
            num_forwarded += len(event.token_ids) > 1
            self.num_tokens += len(event.token_ids)
            if number in last_s:
                gaps_s.append(first_s - last_s[number])
            else:
                self.ttft_s[number] = first_s - self.arrived_s[number]
            last_s[number] = now_s
        if num_forwarded:
            self._fast_forwards.append((np.diff(ends_s), num_forwarded))
        return self.ended(events.others, now_s)

    def ended(self, events: Iterable[TokenEvent], now_s: float) -> int:
        """Record the ends among `events`, and return their number."""
        count = 0
        for event in events:
            if event.finish_reason is None:
                continue
            count += 1
            self._last_s.pop(event.request_id, None)
            self.ended_s = max(self.ended_s, now_s)
            if event.finish_reason is not FinishReason.ERROR:
                self.e2e_s[event.request_id] = now_s - self.arrived_s[event.request_id]
        return count

    def gaps_s(self) -> np.ndarray:
        """Return every gap between two tokens of a request, float64 [n], in no particular order."""
        forwarded = [np.repeat(gaps, count) for gaps, count in self._fast_forwards]
        return np.concatenate([np.array(self._gaps_s, np.float64), *forwarded])


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of one measure, in seconds."""

    p50: float
    p95: float
    p99: float

    @staticmethod
    def of(values: Sequence[float] | np.ndarray) -> "Quantiles | None":
        if not len(values):
            return None
        return Quantiles(*(float(value) for value in np.percentile(np.asarray(values), PERCENTILES)))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Request of a trace. `at_s`: seconds since the trace begins."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()  # names of the prompt's leading blocks: equal names, equal tokens
    block_tokens: int = 0  # 1: the names are the tokens themselves

    def engine_request(self, number: int) -> Request:
        """Return the request. `number`: its number in the trace, which makes the rest of its prompt unique."""
        tokens: list[int] = list(self.blocks) if self.block_tokens == 1 else []
        for name in () if self.block_tokens == 1 else self.blocks:
            tokens += _named(name, self.block_tokens, 1)
        del tokens[self.num_prompt_tokens :]
        tokens += _named(number, max(0, self.num_prompt_tokens - len(tokens)), 2)
        return Request(number, tuple(tokens), SamplingParams(max_tokens=self.num_output_tokens, seed=0))


def _named(name: int, count: int, kind: int) -> list[int]:
    """Return `count` tokens, the first of which encode `kind` and `name`."""
    digits = [kind]
    while name:
        name, digit = divmod(name, _BASE)
        digits.append(digit)
    return (digits + [_FILL] * (count - len(digits)))[:count]


class FastForward(Drafter):
    """Replaces the scheduler's drafter. Drafts only while `is_allowed`, which callers set if nothing waits."""

    def __init__(self, time: StepTime, manager: KVCacheManager, costs: RowCosts) -> None:
        super().__init__(_NO_LOOKUP, costs)
        self._time, self._manager = time, manager
        self.is_allowed = False
        self.steps_s = np.zeros(0)  # float64 [steps]; seconds of the steps drafted by `choose`

    def may_pay(self, num_seqs: int) -> bool:
        return self.is_allowed

    def choose(self, candidates: Sequence[Candidate], num_seqs: int, most: int) -> list[list[int]]:
        """Draft the same number of tokens for each candidate."""
        count = 0
        if len(candidates) == num_seqs:
            count = min(most // num_seqs, min(candidate.room for candidate in candidates))
        lengths = [len(candidate.token_ids) for candidate in candidates]
        if count and not self._has_blocks(lengths, count):
            count = 0
        contexts = sum(lengths) + num_seqs * np.arange(count + 1)
        self.steps_s = self._time.seconds(StepLoad(num_seqs, num_seqs, contexts, contexts))
        return [[TOKEN] * count for _ in candidates]

    def _has_blocks(self, lengths: list[int], count: int) -> bool:
        """Return whether `count` more tokens of each sequence fit into half of the available blocks."""
        of, available = self._manager.blocks_for, self._manager.num_available
        needed = sum(of(length + count) - of(length - 1) for length in lengths)
        return needed + len(lengths) <= available // 2


@dataclass(slots=True)
class _InFlight:
    output: SchedulerOutput
    begun_s: float
    ends_s: np.ndarray  # float64 [steps]: end of the step, or of each step of a fast-forward
    num_arrived: int = 0  # requests that arrived since it began

    @property
    def at_s(self) -> float:
        """Time at which the output arrives."""
        return float(self.ends_s[-1])


class SimulatedReplica:
    """Simulated replica; `records` gets the times of its requests."""

    def __init__(
        self, config: EngineConfig, info: WorkerInfo, time: StepTime, records: Records, *, fast_forward: bool = True
    ) -> None:
        self.scheduler = Scheduler(config, info)
        self._time, self._records = time, records
        self._fast_forward = FastForward(time, self.scheduler.kv_cache_manager, self.scheduler.step_costs)
        self._may_fast_forward = fast_forward
        self.scheduler.drafter = self._fast_forward
        self._in_flight: _InFlight | None = None
        self._now_s = 0.0  # time at which the last step ended
        self._is_steady = False  # whether the next step would do the same as the last one
        self.load = Load(
            max_open=self.scheduler.max_num_seqs + config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        self._new_tokens: dict[int, int] = {}  # request id -> its part of `load.num_waiting_tokens`
        self.busy_s = 0.0
        self.waiting_s = 0.0  # requests in the queue times seconds
        self._waited_to_s = 0.0

    @property
    def block_events(self) -> BlockEventLog:
        """Log of block events, kept from the first call on."""
        manager = self.scheduler.kv_cache_manager
        manager.event_log = manager.event_log or BlockEventLog()
        return manager.event_log

    def advance(self, to_s: float) -> None:
        """Apply every output that arrives up to `to_s`, and begin the steps before it."""
        while True:
            step = self._in_flight
            if step is not None:
                if step.at_s > to_s:
                    return
                self._finish(step)
            if not self.scheduler.has_work or self._now_s >= to_s or not self._begin():
                return

    def add(self, request: Request, now_s: float, num_cached: int) -> bool:
        """Add a request that arrives now, with `num_cached` cached prompt tokens. Return False if it is refused."""
        self._count_waiting(now_s)
        step = self._in_flight
        if step is not None:  # the step that runs now becomes the last of its fast-forward
            step.ends_s = step.ends_s[: int(np.searchsorted(step.ends_s, now_s)) + 1]
            step.num_arrived += 1
        else:
            self._now_s = max(self._now_s, now_s)
        try:
            self.scheduler.add(request, now_s)
        except (QueueFullError, RequestError):
            return False
        self._is_steady = False
        self.load.num_open += 1
        self._new_tokens[request.request_id] = num_new = len(request.prompt_token_ids) - num_cached
        self.load.num_waiting_tokens += num_new
        return True

    def _begin(self) -> bool:
        """Schedule the next step at the end of the last one. Return whether there is any."""
        self._fast_forward.is_allowed = self._may_fast_forward and self._is_steady
        self._count_waiting(self._now_s)
        output = self.scheduler.schedule(self._now_s)
        if output is None:
            return False
        steps_s = self._fast_forward.steps_s if output.num_drafts else np.array([self._time.seconds(load_of(output))])
        self._in_flight = _InFlight(output, self._now_s, self._now_s + np.cumsum(steps_s))
        return True

    def _finish(self, step: _InFlight) -> None:
        output, ends_s = step.output, step.ends_s
        accepted = [len(ends_s) - 1 if item.drafts else 0 for item in output.scheduled]
        num_rows = len(output.decodes.rows) + sum(item.num_rows for item in output.scheduled)
        answer = StepOutput(
            output.step_id,
            np.full(num_rows, TOKEN, np.int32),
            np.full(num_rows, FINITE, np.uint8),
            num_accepted=np.array([0] * len(output.decodes.rows) + accepted, np.int32) if output.num_drafts else None,
        )
        self._in_flight, self._now_s = None, step.at_s
        self.busy_s += step.at_s - step.begun_s
        steps_s = np.diff(ends_s, prepend=step.begun_s)
        num_before = max(0, len(steps_s) - REMEMBERED)  # only the last steps of a fast-forward are observed
        for seconds in steps_s[num_before:].tolist():
            self.scheduler.step_costs.observe(output.num_decodes, output.num_prompt_tokens, seconds, num_before)
            num_before = 0
        events = self.scheduler.update_from_output(output, ModelRunnerOutput(answer), self._now_s)
        failed = self.scheduler.take_events()
        num_ended = self._records.tokens(events, ends_s) + self._records.ended(failed, self._now_s)
        self.load.num_open -= num_ended
        for event in (*events.others, *failed):  # the first event of a request is never in columns
            self.load.num_waiting_tokens -= self._new_tokens.pop(event.request_id, 0)
        changed = num_ended + step.num_arrived + output.num_prompt_tokens + output.num_preempted
        self._is_steady = changed == 0

    def _count_waiting(self, now_s: float) -> None:
        self.waiting_s += self.scheduler.num_waiting * max(0.0, now_s - self._waited_to_s)
        self._waited_to_s = max(self._waited_to_s, now_s)


def load_of(output: SchedulerOutput) -> StepLoad:
    """Return the work of a step without a fast-forward."""
    positions, scheduled = output.decodes.positions, output.scheduled
    context = int(positions.sum()) + len(positions)
    pairs = context + sum(item.num_tokens * item.start + math.comb(item.num_tokens + 1, 2) for item in scheduled)
    return StepLoad(
        tokens=len(positions) + sum(item.num_tokens for item in scheduled),
        rows=len(positions) + sum(item.wants_logits for item in scheduled),
        context=context + sum(item.start + item.num_tokens for item in scheduled),
        pairs=pairs,
    )


class AtRandom:
    """Chooses a replica at random, always with the same seed."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._random = random.Random(0)

    def choose(self, request: Request) -> tuple[int, int]:
        return self._random.randrange(len(self._replicas)), 0


class LeastLoaded:
    """Chooses the replica with the fewest open requests; among equals, the next in turn."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._turn = 0

    def choose(self, request: Request) -> tuple[int, int]:
        count, loads = len(self._replicas), [replica.load.num_open for replica in self._replicas]
        chosen = min(range(count), key=lambda place: (loads[place], (place - self._turn) % count))
        self._turn = chosen + 1
        return chosen, 0


class ByPrefix:
    """Chooses by the longest cached prefix within a bound on the load, with the code of `--data-parallel-size`."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._logs = [replica.block_events for replica in replicas]
        self._prefixes = PrefixIndex(len(replicas), replicas[0].scheduler.kv_cache_manager.block_size)

    def choose(self, request: Request) -> tuple[int, int]:
        for place, log in enumerate(self._logs):
            if events := log.take():
                self._prefixes.apply(place, BlockChanges.of(events))
        num_cached = self._prefixes.num_cached(request.prompt_token_ids, request.cache_salt)
        chosen = choose([replica.load for replica in self._replicas], num_cached)
        self._replicas[chosen].load.num_chosen += 1
        return chosen, num_cached[chosen]


ROUTERS = {"prefix": ByPrefix, "least-loaded": LeastLoaded, "random": AtRandom}


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Counts, rates and latencies of a simulated fleet. Times are seconds of virtual time."""

    replicas: int
    finished: int
    refused: int  # requests refused because the queue is full, or because they exceed the longest context
    failed: int
    duration_s: float  # time from the first arrival to the last end
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None  # every gap of every request
    e2e_s: Quantiles | None
    utilisation: float  # share of the time in which a replica computes, mean of all
    mean_waiting: float  # requests in the queue of one replica
    prefix_hit_rate: float  # share of prompt tokens
    preemptions: int


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """Configuration and speed of every replica of a fleet."""

    config: EngineConfig
    info: WorkerInfo
    time: StepTime


def _step_tokens(config: WorkerConfig, cost: StepCost) -> int:
    """Return the number of tokens of the largest step, by the same rule as a server that has measured `cost`."""
    tokens = config.max_num_batched_tokens
    return min(tokens, cost.largest_step(max(64, config.max_num_seqs), tokens)) if config.lower_step_size else tokens


def replica_model(
    config: EngineConfig, held: Capacity, vocab_size: int, window: int | None, time: StepTime
) -> ReplicaModel:
    """Return a replica of a plan, configured as if it had timed a few steps. `window`: sliding window of all layers."""
    one, some = (time.seconds(StepLoad(count, 1, count, count * (count + 1) / 2)) for count in (1, _PROMPT))
    token_s = (some - one) / (_PROMPT - 1)
    cost = StepCost(fixed_s=max(0.0, one - token_s), token_s=token_s, context_s=0.0, logits_s=0.0)
    worker = held.config.with_(max_num_batched_tokens=_step_tokens(held.config, cost))
    info = replica_info(worker, held.num_blocks, vocab_size, sliding_window=window, step_cost=cost)
    return ReplicaModel(replace(config, worker=worker, speculative=None), info, time)


def simulate_fleet(
    trace: Sequence[TracedRequest],
    num_replicas: int,
    model: ReplicaModel,
    routing: str,
    on_progress: Callable[[float], object],
    *,
    fast_forward: bool = True,
) -> FleetReport:
    """Simulate `trace`, in the order of arrival. `on_progress` gets the share of requests that have arrived."""
    records = Records()
    replicas = [
        SimulatedReplica(model.config, model.info, model.time, records, fast_forward=fast_forward)
        for _ in range(num_replicas)
    ]
    router = ROUTERS[routing](replicas)
    for number, traced in enumerate(trace, 1):
        at_s = traced.at_s
        for replica in replicas:
            replica.advance(at_s)
        request = traced.engine_request(number)
        records.arrived_s[number] = at_s
        place, num_cached = router.choose(request)
        records.num_refused += not replicas[place].add(request, at_s, num_cached)
        if number % _REPORT_EVERY == 0:
            on_progress(number / len(trace))
    for replica in replicas:
        replica.advance(float("inf"))
    on_progress(1.0)
    return _report(records, replicas, trace[0].at_s)


def _report(records: Records, replicas: Sequence[SimulatedReplica], began_s: float) -> FleetReport:
    stats = [replica.scheduler.refresh_gauges() for replica in replicas]
    duration_s = max(records.ended_s - began_s, 1e-9)
    finished = len(records.e2e_s)
    asked = sum(each.prefix_cache_queries for each in stats)
    return FleetReport(
        replicas=len(replicas),
        finished=finished,
        refused=records.num_refused,
        failed=len(records.arrived_s) - records.num_refused - finished,
        duration_s=duration_s,
        output_tokens_per_s=records.num_tokens / duration_s,
        requests_per_s=finished / duration_s,
        ttft_s=Quantiles.of(list(records.ttft_s.values())),
        itl_s=Quantiles.of(records.gaps_s()),
        e2e_s=Quantiles.of(list(records.e2e_s.values())),
        utilisation=sum(replica.busy_s for replica in replicas) / duration_s / len(replicas),
        mean_waiting=sum(replica.waiting_s for replica in replicas) / duration_s / len(replicas),
        prefix_hit_rate=sum(each.prefix_cache_hits for each in stats) / max(1, asked),
        preemptions=sum(each.num_preemptions for each in stats),
    )
