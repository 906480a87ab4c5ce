"""Fleets in virtual time: fast-forwards give the same times as single steps, and as the real engine's loop."""

import random
from dataclasses import replace

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.fleet import (
    ROUTERS,
    FleetReport,
    Records,
    ReplicaModel,
    SimulatedReplica,
    TracedRequest,
    simulate_fleet,
)
from oarlock.engine.simulated_ranks import CostModel, Roofline, Speed, StepLoad, replica_info
from oarlock.workers.capacity import RankWork
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import Arrival, SimulationConfig, Watch, simulate

COST = CostModel(step_s=0.020, token_s=0.0006, context_token_s=2e-7)
CONFIG = EngineConfig(
    WorkerConfig("none", max_model_len=4096, max_num_batched_tokens=512),
    max_waiting_requests=5000,
    max_waiting_tokens=10**8,
    pipeline_depth=1,
)


class Line:
    """`COST` as a `StepTime`."""

    def seconds(self, load: StepLoad) -> float:
        return COST.step_s + COST.token_s * load.tokens + COST.context_token_s * load.context


def trace(count: int, rate: float, *, prefixes: int = 6, mean: int = 80, seed: int = 1) -> list[TracedRequest]:
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        prompt, output = 1 + int(rng.expovariate(1 / 300)), 1 + int(rng.expovariate(1 / mean))
        found.append(TracedRequest(at_s, prompt, output, (rng.randrange(prefixes),), 128))
    return found


def run(
    requests: list[TracedRequest], replicas: int = 1, routing: str = "prefix", *, blocks: int = 3000, **changes
) -> FleetReport:
    config = replace(CONFIG, **{name: value for name, value in changes.items() if name != "fast_forward"})
    model = ReplicaModel(config, replica_info(config.worker, blocks, 300), Line())
    return simulate_fleet(
        requests, replicas, model, routing, lambda share: None, fast_forward=changes.get("fast_forward", True)
    )


def same(one: FleetReport, other: FleetReport) -> None:
    """Whether two reports are equal up to the rounding of sums."""
    assert (one.finished, one.refused, one.preemptions) == (other.finished, other.refused, other.preemptions)
    for name in ("ttft_s", "itl_s", "e2e_s"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine.p50, mine.p95, mine.p99) == pytest.approx((theirs.p50, theirs.p95, theirs.p99), rel=1e-9)
    assert one.utilisation == pytest.approx(other.utilisation) and one.prefix_hit_rate == other.prefix_hit_rate
    assert one.mean_waiting == pytest.approx(other.mean_waiting, abs=1e-9)


@pytest.mark.parametrize(
    ("rate", "replicas", "routing"), [(1.5, 1, "prefix"), (6.0, 1, "prefix"), *((6.0, 3, name) for name in ROUTERS)]
)
@pytest.mark.slow
def test_fast_forwards_give_the_times_of_single_steps(rate: float, replicas: int, routing: str) -> None:
    requests = trace(60, rate)
    forwarded = run(requests, replicas, routing)
    assert forwarded.finished == 60 and forwarded.itl_s is not None
    same(forwarded, run(requests, replicas, routing, fast_forward=False))


@pytest.mark.slow
def test_one_replica_is_the_engine_in_virtual_time() -> None:
    requests = trace(80, 3.0)
    arrivals = [
        Arrival(one.at_s, one.engine_request(number).prompt_token_ids, one.num_output_tokens)
        for number, one in enumerate(requests, 1)
    ]
    watch = Watch()
    engine = simulate(arrivals, SimulationConfig(CONFIG, num_blocks=3000, vocab_size=300, cost=COST), watch)
    fleet = run(requests)
    assert fleet.finished == engine.num_finished == 80
    for ours, theirs in (
        (fleet.ttft_s, engine.time_to_first_token_s),
        (fleet.itl_s, engine.inter_token_latency_s),
        (fleet.e2e_s, engine.e2e_latency_s),
    ):
        assert ours is not None and (ours.p50, ours.p99) == pytest.approx((theirs.p50, theirs.p99), rel=1e-9)
    assert fleet.prefix_hit_rate == pytest.approx(engine.prefix_cache_hit_rate)


@pytest.mark.slow
def test_a_small_pool_preempts_and_everyone_is_served() -> None:
    report = run(trace(40, 30.0, prefixes=40, mean=400), blocks=130)
    assert report.finished == 40 and report.preemptions > 0


def test_what_a_server_refuses_is_refused() -> None:
    long = [*trace(10, 5.0), TracedRequest(100.0, 5000, 10)]
    assert run(long).refused == 1
    crowd = run(trace(300, 1000.0), max_waiting_requests=20)
    assert crowd.refused > 100 and crowd.finished + crowd.refused == 300 and crowd.failed == 0


@pytest.mark.slow
def test_more_replicas_wait_less_and_routing_by_prefix_finds_more() -> None:
    requests = trace(150, 12.0)
    one, four = run(requests), run(requests, 4)
    assert one.ttft_s is not None and four.ttft_s is not None
    assert four.ttft_s.p99 < one.ttft_s.p99 and four.utilisation < one.utilisation
    by_chance = run(requests, 4, "random")
    assert four.prefix_hit_rate > by_chance.prefix_hit_rate
    assert run(requests, 4, "random") == by_chance, "the same trace, the same report"


def test_what_a_router_counts_of_a_replica_is_what_it_has_to_do() -> None:
    config = replace(CONFIG, max_waiting_requests=8)
    model = ReplicaModel(config, replica_info(config.worker, 1000, 300), Line())
    records = Records()
    replicas = [SimulatedReplica(config, model.info, model.time, records) for _ in range(2)]
    router, most = ROUTERS["prefix"](replicas), 0
    for number, one in enumerate(trace(120, 60.0), 1):
        for replica in replicas:
            replica.advance(one.at_s)
            assert replica.load.num_open == replica.scheduler.num_running + replica.scheduler.num_waiting
        records.arrived_s[number] = one.at_s
        request = one.engine_request(number)
        place, num_cached = router.choose(request)
        assert num_cached < len(request.prompt_token_ids)
        replicas[place].add(request, one.at_s, num_cached)
        most = max(most, replicas[place].load.num_waiting_tokens)
    assert most > 1000
    for replica in replicas:
        replica.advance(float("inf"))
        assert (replica.load.num_open, replica.load.num_waiting_tokens) == (0, 0)
    chosen = [replica.load.num_chosen for replica in replicas]
    assert sum(chosen) == 120 and min(chosen) > 30


def test_equal_names_are_equal_beginnings_and_nothing_else_is() -> None:
    one, same_name, other = (
        TracedRequest(0.0, 40, 1, blocks, 16).engine_request(number).prompt_token_ids
        for number, blocks in enumerate([(7, 300), (7, 301), (8, 300)], 1)
    )
    assert len(one) == 40 and one[:16] == same_name[:16] and one[16:32] != same_name[16:32] and one[:16] != other[:16]
    assert one[32:] != same_name[32:]
    tokens = TracedRequest(0.0, 3, 1, (5, 900, 6), 1).engine_request(1).prompt_token_ids
    assert tokens == (5, 900, 6)


def test_the_roofline_reads_or_computes_whichever_takes_longer() -> None:
    work = RankWork(10**9, 1000, 1e9, 1e8, 10.0, 0, 0, 0)
    speed = Speed(bandwidth=1e10, ops=1e11, link=0.0, sum_s=0.0, step_s=0.001, is_shared=False)
    time = Roofline((work,), 1, speed)
    assert time.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.101)
    assert time.seconds(StepLoad(100, 1, 100, 5000)) == pytest.approx(0.001 + (1e11 + 1e8 + 5e4) / 1e11)
    shared = Roofline((work,), 2, replace(speed, is_shared=True))
    assert shared.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.201), "two ranks read through the same memory"
    sums = replace(work, sum_bytes=1000, num_sums=4)
    linked = Roofline((sums,), 2, replace(speed, link=1e6, sum_s=0.5))
    assert linked.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.101 + 4 * 0.5 + 0.001)
