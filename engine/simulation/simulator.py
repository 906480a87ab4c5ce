"""The engine in virtual time: the real scheduler, step builder and commit, ranks that only cost time.

Answers "how would these settings serve this traffic" in seconds, without a model, a device or a socket. The same trace
and settings give the same report, to the last digit. Does not know what tokens mean.
"""

import heapq
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from engine.config import EngineConfig, WorkerConfig
from engine.core.engine_core import EngineCore
from engine.errors import QueueFullError, RequestError
from engine.sampling_params import SamplingParams
from engine.types import FinishReason, Request, TokenEvent
from workers.config import WorkerInfo
from workers.executor import FillMasks
from workers.protocol import StepMetadata, StepOutput

_END = 0  # the token that ends an answer


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    time_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int  # after which the model ends by itself
    priority: int = 0
    max_tokens: int | None = None  # what the request allows; None: just as many


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step: weights are read once, tokens and cached context cost by their number."""

    step_s: float = 0.020
    token_s: float = 0.0006
    context_token_s: float = 2e-7

    def seconds(self, step: StepMetadata) -> float:
        context = int(step.seq_lens.sum())
        return self.step_s + self.token_s * step.num_tokens + self.context_token_s * context


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """What is simulated. `engine.worker.max_model_len` must be given: there is no model to ask."""

    engine: EngineConfig
    num_blocks: int = 1024
    vocab_size: int = 32_000
    cost: CostModel = field(default_factory=CostModel)


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
    """What the users of the trace would have seen. Times are virtual seconds."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _CostGroup:
    """Ranks that take their time and answer with tokens that depend on (seed, position) alone, the last with `_END`."""

    rank_pids: tuple[int, ...] = ()

    def __init__(
        self, config: WorkerConfig, info: WorkerInfo, cost: CostModel, clock: _Clock, ends: np.ndarray
    ) -> None:
        """`ends` int64 by seed: the position of each sequence's last token."""
        self.config = config
        self.info = info
        self._cost = cost
        self._clock = clock
        self._ends = ends
        self.num_tokens = 0  # computed, in all steps
        self._step: StepMetadata | None = None

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        if fill_masks is not None:
            fill_masks(step.mask_bits)
        self._step = step

    def collect(self) -> StepOutput:
        step, self._step = self._step, None
        assert step is not None
        self._clock.now_s += self._cost.seconds(step)
        self.num_tokens += step.num_tokens
        mixed = step.seeds * 1_000_003 + step.sample_positions.astype(np.int64) * 7919
        sampled = np.where(
            step.sample_positions == self._ends[step.seeds], _END, 1 + mixed % (self.info.vocab_size - 1)
        )
        token_ids = np.where(step.target_ids >= 0, step.target_ids, sampled)
        return StepOutput(step.step_id, token_ids.astype(np.int32), np.ones(len(token_ids), bool))

    def ping(self) -> None:
        return None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self) -> None:
        self._step = None


class Watch:
    """What each request saw, by its number in the trace, from 1."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.last_s: dict[int, float] = {}
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.e2e_s: list[float] = []
        self.num_errors = 0

    def see(self, events: Iterable[TokenEvent], now: float) -> None:
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
    """Poisson arrivals, exponential lengths, an optional prefix that all prompts share."""
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


def simulate(trace: Iterable[Arrival], config: SimulationConfig, watch: Watch | None = None) -> Report:
    """Play `trace` against the engine's own loop. Refused requests are counted, not retried. A fresh `watch` that is
    given tells of single requests."""
    clock = _Clock()
    worker = config.engine.worker
    arrivals = [(arrival.time_s, number, arrival) for number, arrival in enumerate(trace, 1)]
    ends = [0, *(len(arrival.prompt_token_ids) + arrival.num_output_tokens - 1 for _, _, arrival in arrivals)]
    group = _CostGroup(worker, _info(config), config.cost, clock, np.array(ends, np.int64))
    stepper = EngineCore(config.engine, group, clock)
    scheduler, watch = stepper.scheduler, watch or Watch()
    heapq.heapify(arrivals)
    peak_usage, max_running, max_preempted = 0.0, 0, 0
    while arrivals or scheduler.has_work:
        if not scheduler.has_work:
            clock.now_s = max(clock.now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock.now_s:
            time_s, number, arrival = heapq.heappop(arrivals)
            watch.arrived_s[number] = time_s
            try:
                scheduler.add(_request(number, arrival), time_s)
            except (QueueFullError, RequestError):
                continue  # counted by the scheduler
        output = stepper.begin()
        if output is None:
            watch.see(stepper.take_events(), clock.now_s)
            continue
        stats = scheduler.refresh_gauges()
        peak_usage = max(peak_usage, stats.kv_cache_usage)
        max_running = max(max_running, stats.num_requests_running)
        max_preempted = max(max_preempted, *(work.seq.num_preemptions for work in output.work))
        watch.see(stepper.finish(output) + stepper.take_events(), clock.now_s)
    return _report(stepper, watch, clock.now_s, group.num_tokens, peak_usage, max_running, max_preempted)


def _report(
    stepper: EngineCore,
    watch: Watch,
    duration_s: float,
    num_tokens_computed: int,
    peak_usage: float,
    max_running: int,
    max_preempted: int,
) -> Report:
    stats = stepper.scheduler.refresh_gauges()
    seconds = max(duration_s, 1e-9)
    return Report(
        num_finished=len(watch.e2e_s),
        num_rejected=stats.num_rejected,
        num_errors=watch.num_errors,
        num_steps=stats.step_id,
        num_tokens_computed=num_tokens_computed,
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
    )


def _request(number: int, arrival: Arrival) -> Request:
    max_tokens = arrival.num_output_tokens if arrival.max_tokens is None else arrival.max_tokens
    params = SamplingParams(max_tokens=max_tokens, seed=number, eos_token_ids=(_END,))
    return Request(number, arrival.prompt_token_ids, params, priority=arrival.priority)


def _info(config: SimulationConfig) -> WorkerInfo:
    worker = config.engine.worker
    if worker.max_model_len is None:
        raise ValueError("a simulation has no model to ask: set max_model_len")
    return WorkerInfo(
        num_blocks=config.num_blocks,
        block_size=worker.block_size,
        max_model_len=worker.max_model_len,
        vocab_size=config.vocab_size,
        tensor_parallel_size=worker.tensor_parallel_size,
        device="simulated",
        dtype="none",
        attention_backend="none",
        architecture="Simulated",
        num_parameters=0,
        weight_bytes_per_rank=0,
        kv_bytes_per_token_per_rank=0,
        load_seconds=0.0,
    )
