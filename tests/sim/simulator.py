"""Simulates the engine in virtual time: the real `EngineCore`, and ranks that only take time.

Shows in seconds how given settings would serve given traffic, without a model, a device or a socket. The same trace and
settings give the same report, to the last digit.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.errors import QueueFullError, RequestError
from oarlock.engine.lora.registry import POLL_S
from oarlock.engine.simulated_ranks import (
    END_TOKEN,
    CostModel,
    SimulatedExecutor,
    VirtualClock,
    replica_info,
)
from oarlock.engine.types import POOLS, FinishReason, PoolingParams, Request, SamplingParams, TokenEvent
from oarlock.workers.config import GroupInfo


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. Times are virtual seconds."""

    time_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int  # the last of them ends the sequence
    priority: int = 0
    max_tokens: int | None = None  # the limit in the request; None: num_output_tokens
    client: str = ""
    is_low_priority: bool = False
    pooling: PoolingParams | None = None  # vectors are wanted, and no answer
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """Loading or unloading of an adapter during a simulation."""

    time_s: float
    name: str
    number: int | None = None  # of the content that is loaded; None: the name is unloaded

    def apply(self, engine_core: EngineCore, now: float) -> list[TokenEvent]:
        """Make the change, and return the events of requests that it ends."""
        scheduler = engine_core.scheduler
        assert scheduler.adapters is not None
        if self.number is None:
            return scheduler.adapters.remove(self.name, list(scheduler.requests.by_id.values()), now)
        scheduler.adapters.add(self.name, self.number.to_bytes(16, "big").hex(), f"/{self.number}", now)
        return []


def make_trace(
    *,
    num_requests: int,
    requests_per_s: float,
    mean_prompt_tokens: int,
    mean_output_tokens: int,
    max_prompt_tokens: int,
    shared_prefix_tokens: int = 0,
    vocab_size: int = 32_000,
    seed: int = 0,
) -> list[Arrival]:
    """Poisson arrivals, exponential lengths, and a prefix of `shared_prefix_tokens` that all prompts share."""
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(vocab_size) for _ in range(shared_prefix_tokens))
    trace = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(requests_per_s)
        length = min(max_prompt_tokens - len(prefix), 1 + int(rng.expovariate(1 / mean_prompt_tokens)))
        own = tuple(rng.randrange(vocab_size) for _ in range(max(1, length)))
        trace.append(Arrival(now, prefix + own, 1 + int(rng.expovariate(1 / mean_output_tokens))))
    return trace


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Settings of a simulation. `engine.worker.max_model_len` must be set: there is no model to read it from."""

    engine: EngineConfig
    num_blocks: int = 1024
    groups: tuple[GroupInfo, ...] = ()  # memory groups; (): one of `num_blocks` blocks
    vocab_size: int = 32_000
    cost: CostModel = field(default_factory=CostModel)  # of each pipeline stage
    stages: tuple[CostModel, ...] = ()  # the cost of each, where they differ
    ranks: Callable[..., SimulatedExecutor] = SimulatedExecutor
    changes: tuple[AdapterChange, ...] = ()  # in the order of their times


@dataclass(frozen=True, slots=True)
class Percentiles:
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: list[float]) -> "Percentiles":
        if not values:
            return Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return Percentiles(sum(values) / len(values), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Report:
    """Counts, rates and latencies of one simulation. Times are virtual seconds."""

    num_finished: int
    num_rejected: int
    num_errors: int
    num_steps: int
    num_tokens_computed: int  # more than there are tokens when preempted sequences are computed again
    duration_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    time_to_first_token_s: Percentiles
    inter_token_latency_s: Percentiles
    e2e_latency_s: Percentiles
    num_preemptions: int
    max_preemptions_of_one: int
    peak_kv_cache_usage: float
    prefix_cache_hit_rate: float
    max_running: int
    busy: tuple[float, ...]  # the share of the time in which each pipeline stage computes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watch:
    """Times of single requests, in virtual seconds, by their number in the trace, from 1."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.e2e_s: list[float] = []
        self.num_errors = 0

    def record(self, events: Iterable[TokenEvent], now: float) -> None:
        for event in events:
            request_id = event.request_id
            if event.token_ids:
                if request_id in self.last_s:
                    self.itl_s.append(now - self.last_s[request_id])
                else:
                    self.first_s[request_id] = now
                    self.ttft_s.append(now - self.arrived_s[request_id])
                self.last_s[request_id] = now
            if event.finish_reason is FinishReason.ERROR:
                self.num_errors += 1
            elif event.finish_reason is not None:
                self.e2e_s.append(now - self.arrived_s[request_id])


def simulate(trace: Iterable[Arrival], config: SimulationConfig, watch: Watch | None = None) -> Report:
    """Run `trace` through the engine. Refused requests are counted, not retried.

    `watch`, if given, must be new; it receives the times of single requests. Raises `ValueError` without
    `max_model_len`.
    """
    clock = VirtualClock()
    worker = config.engine.worker
    arrivals = [(arrival.time_s, number, arrival) for number, arrival in enumerate(trace, 1)]
    ends = [0, *(len(arrival.prompt_token_ids) + arrival.num_output_tokens - 1 for _, _, arrival in arrivals)]
    costs = config.stages or (config.cost,) * worker.pipeline_parallel_size
    info = replica_info(worker, config.num_blocks, config.vocab_size, groups=config.groups)
    executor = config.ranks(worker, info, costs, clock, np.array(ends, np.int64))
    engine_core = EngineCore(config.engine, executor, clock)
    scheduler, watch = engine_core.scheduler, watch or Watch()
    heapq.heapify(arrivals)
    changes = deque(config.changes)
    peak_usage, max_running, max_preempted = 0.0, 0, 0
    while arrivals or scheduler.has_work or engine_core.num_in_flight:
        if not scheduler.has_work and not engine_core.num_in_flight:
            clock.now_s = max(clock.now_s, arrivals[0][0])
        while changes and changes[0].time_s <= clock.now_s:
            watch.record(changes.popleft().apply(engine_core, clock.now_s), clock.now_s)
        while arrivals and arrivals[0][0] <= clock.now_s:
            time_s, number, arrival = heapq.heappop(arrivals)
            watch.arrived_s[number] = time_s
            try:
                scheduler.add(_request(number, arrival), time_s)
            except (QueueFullError, RequestError):
                continue  # counted by the scheduler
        output = engine_core.begin()
        if output is not None:
            stats = scheduler.refresh_gauges()
            peak_usage = max(peak_usage, stats.kv_cache_usage)
            max_running = max(max_running, stats.num_requests_running)
            max_preempted = max([max_preempted, *(item.seq.num_preemptions for item in output.items())])
        if engine_core.num_in_flight and (output is None or engine_core.is_full):
            watch.record(engine_core.finish(), clock.now_s)
        elif output is None and scheduler.awaits_files:
            clock.now_s += POLL_S
        watch.record(engine_core.take_events(), clock.now_s)
    return _report(engine_core, executor, watch, clock.now_s, peak_usage, max_running, max_preempted)


def _report(
    engine_core: EngineCore,
    executor: SimulatedExecutor,
    watch: Watch,
    duration_s: float,
    peak_usage: float,
    max_running: int,
    max_preempted: int,
) -> Report:
    stats = engine_core.scheduler.refresh_gauges()
    seconds = max(duration_s, 1e-9)
    return Report(
        num_finished=len(watch.e2e_s),
        num_rejected=stats.num_rejected,
        num_errors=watch.num_errors,
        num_steps=stats.step_id,
        num_tokens_computed=executor.num_tokens,
        duration_s=duration_s,
        prompt_tokens_per_s=stats.prompt_tokens / seconds,
        output_tokens_per_s=stats.generation_tokens / seconds,
        time_to_first_token_s=Percentiles.of(watch.ttft_s),
        inter_token_latency_s=Percentiles.of(watch.itl_s),
        e2e_latency_s=Percentiles.of(watch.e2e_s),
        num_preemptions=stats.num_preemptions,
        max_preemptions_of_one=max_preempted,
        peak_kv_cache_usage=peak_usage,
        prefix_cache_hit_rate=stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
        max_running=max_running,
        busy=tuple(busy_s / seconds for busy_s in executor.busy_s),
    )


def _request(number: int, arrival: Arrival) -> Request:
    if arrival.pooling is not None:
        salt, client = b"", arrival.client
        return Request(number, arrival.prompt_token_ids, POOLS, arrival.priority, salt, client, pooling=arrival.pooling)
    max_tokens = arrival.num_output_tokens if arrival.max_tokens is None else arrival.max_tokens
    params = SamplingParams(max_tokens=max_tokens, seed=number, eos_token_ids=(END_TOKEN,))
    return Request(
        number,
        arrival.prompt_token_ids,
        params,
        priority=arrival.priority,
        client=arrival.client,
        is_low_priority=arrival.is_low_priority,
        adapter=arrival.adapter,
    )
