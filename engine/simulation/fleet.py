"""Simulates a trace on a fleet of replicas in virtual time: latencies of requests, and how busy replicas are.

Routers choose at random, the least loaded replica, or as our frontend does. They see present loads and caches; a real
one learns of them a little later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from oarlock.engine.config import EngineConfig
from oarlock.engine.data_parallel.choice import PrefixIndex, choose
from oarlock.engine.kv_cache.events import BlockChanges
from oarlock.engine.simulation.fleet_replica import SimulatedReplica
from oarlock.engine.simulation.fleet_requests import Quantiles, Records, TracedRequest
from oarlock.engine.simulation.roofline import StepLoad, StepTime
from oarlock.engine.simulation.simulated_ranks import replica_info
from oarlock.engine.types import Request
from oarlock.workers.capacity import Capacity, step_tokens
from oarlock.workers.config import StepCost, WorkerInfo

_REPORT_EVERY = 64  # requests
_PROMPT = 256  # tokens of the prompt from which the cost of one token is computed


class Router(Protocol):
    """Chooses among replicas whose steps have been simulated up to the arrival."""

    def choose(self, request: Request) -> tuple[int, int]:
        """Choose a replica: its place, and how many tokens of the prompt the router knows to be cached there."""
        ...


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
    """Chooses by the longest cached prefix within a bound of load, with the code of `--data-parallel-size`."""

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
    refused: int  # by a full queue, or longer than the longest context
    failed: int
    duration_s: float  # from the first arrival to the last end
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Quantiles | None
    itl_s: Quantiles | None  # every gap of every request
    e2e_s: Quantiles | None
    utilisation: float  # share of the time in which a replica computes, over all
    mean_waiting: float  # requests in the queue of one replica
    prefix_hit_rate: float  # of prompt tokens
    preemptions: int


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """Configuration and speed of every replica of a fleet."""

    config: EngineConfig
    info: WorkerInfo
    time: StepTime


def replica_model(
    config: EngineConfig, held: Capacity, vocab_size: int, window: int | None, time: StepTime
) -> ReplicaModel:
    """Make a replica of a plan, configured as if it had timed a few steps. `window`: of all layers."""
    one, some = (time.seconds(StepLoad(count, 1, count, count * (count + 1) / 2)) for count in (1, _PROMPT))
    token_s = (some - one) / (_PROMPT - 1)
    cost = StepCost(fixed_s=max(0.0, one - token_s), token_s=token_s, context_s=0.0, logits_s=0.0)
    worker = held.config.with_(max_num_batched_tokens=step_tokens(held.config, cost))
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
