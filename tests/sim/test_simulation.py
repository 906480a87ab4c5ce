"""Hundreds of requests in virtual time: the real loop, ranks that only cost time."""

from dataclasses import replace

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.simulated_ranks import CostModel
from oarlock.engine.types import KINDS, PoolingParams
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import Arrival, Percentiles, SimulationConfig, make_trace, simulate

ENGINE = {"max_waiting_requests": 5000, "max_waiting_tokens": 10**7}


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.soak), 2], autouse=True)
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs at the usual pipeline depth, and in the longer run without steps scheduled ahead."""
    monkeypatch.setitem(ENGINE, "pipeline_depth", request.param)


def config(*, num_blocks: int = 1200, budget: int = 512, **engine) -> SimulationConfig:
    worker = WorkerConfig("none", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=budget, block_size=32)
    return SimulationConfig(EngineConfig(worker, **{**ENGINE, **engine}), num_blocks=num_blocks)


def trace(**changes) -> list[Arrival]:
    settings = {
        "num_requests": 500,
        "requests_per_s": 6.0,
        "mean_prompt_tokens": 120,
        "mean_output_tokens": 60,
        "max_prompt_tokens": 1000,
        "shared_prefix_tokens": 64,
        "seed": 7,
    }
    return make_trace(**{**settings, **changes})


@pytest.mark.slow
def test_hundreds_of_requests_all_finish() -> None:
    report = simulate(trace(), config())
    assert report.num_finished == 500 and report.num_rejected == report.num_errors == 0
    assert report.num_preemptions == 0 and report.max_running <= 64
    assert 0 < report.peak_kv_cache_usage <= 1 and report.prefix_cache_hit_rate > 0.2
    assert report.time_to_first_token_s.p50 > 0 and report.output_tokens_per_s > 0


@pytest.mark.slow
def test_requests_for_vectors_run_beside_answers() -> None:
    mixed = [
        replace(arrival, pooling=PoolingParams(KINDS[n % 5], (3, 4) if n % 5 == 4 else ())) if n % 3 else arrival
        for n, arrival in enumerate(trace(num_requests=90, requests_per_s=40.0, mean_output_tokens=300))
    ]
    report = simulate(mixed, config(num_blocks=70))
    assert report.num_finished == 90 and report.num_rejected == report.num_errors == 0
    assert report.num_preemptions > 0 and report.prefix_cache_hit_rate > 0
    assert report == simulate(mixed, config(num_blocks=70))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report_and_another_does_not() -> None:
    first = simulate(trace(num_requests=80), config())
    assert first == simulate(trace(num_requests=80), config())
    assert first != simulate(trace(num_requests=80, seed=8), config())


@pytest.mark.slow
def test_an_overloaded_pool_preempts_and_still_serves_everyone() -> None:
    crowd = trace(num_requests=150, requests_per_s=50.0, mean_output_tokens=300)
    report = simulate(crowd, config(num_blocks=140))
    assert report.num_finished == 150 and report.num_errors == 0
    assert report.num_preemptions > 0 and report.max_preemptions_of_one <= 3
    assert report.peak_kv_cache_usage > 0.9


def test_no_request_waits_much_longer_than_its_turn() -> None:
    """All at once: the n-th request gets its first token about n-th."""
    arrivals = [Arrival(0.0, tuple(range(1, 40 + n % 50)), 20) for n in range(600)]
    report = simulate(arrivals, config())
    served_per_s = 600 / report.duration_s
    # the last one's first token comes no later than all the work before it takes, and no step is wasted
    assert report.time_to_first_token_s.max <= 600 / served_per_s
    assert report.time_to_first_token_s.p50 <= 0.55 * report.duration_s
    assert report.num_finished == 600


def test_a_long_prefill_never_stops_the_others() -> None:
    """While prompts of 1,900 tokens come in, the gap between two tokens stays that of one full step."""
    short = [Arrival(0.0, tuple(range(1, 20)), 600) for _ in range(8)]
    long = [Arrival(1.0 + n, tuple(range(n, 1900 + n)), 2) for n in range(5)]
    cost = CostModel()
    report = simulate(short + long, replace(config(budget=256), cost=cost))
    full_step = cost.step_s + 256 * cost.token_s + cost.context_token_s * 40_000
    assert report.inter_token_latency_s.max <= full_step
    assert report.num_finished == 13


def test_a_cached_prefix_saves_most_of_the_time_to_first_token() -> None:
    prefix = tuple(range(1600))
    first, second = Arrival(0.0, prefix, 1), Arrival(100.0, (*prefix, 5), 1)
    cold = simulate([first], config()).time_to_first_token_s.max
    both = simulate([first, second], config())
    assert both.time_to_first_token_s.p50 * 2 - cold < 0.1 * cold  # the second one's own
    without = simulate([first, second], config(enable_prefix_caching=False))
    assert without.prefix_cache_hit_rate == 0 and without.time_to_first_token_s.max >= cold


@pytest.mark.slow
def test_a_full_queue_refuses_and_keeps_the_rest_quick() -> None:
    crowd = trace(requests_per_s=60.0)
    bounded = simulate(crowd, config(max_waiting_requests=32))
    patient = simulate(crowd, config())
    assert bounded.num_rejected > 0 and bounded.num_finished + bounded.num_rejected == 500
    assert bounded.time_to_first_token_s.p99 < patient.time_to_first_token_s.p99 / 3


def test_urgent_requests_come_first_but_none_starves() -> None:
    many = [Arrival(0.001 * n, tuple(range(100)), 30, priority=n % 2) for n in range(200)]
    equal = [replace(arrival, priority=0) for arrival in many]
    assert simulate(many, config()).num_finished == simulate(equal, config()).num_finished == 200


def test_lengths_that_cannot_be_simulated_are_named() -> None:
    broken = config()
    broken = replace(broken, engine=replace(broken.engine, worker=replace(broken.engine.worker, max_model_len=None)))
    with pytest.raises(ValueError, match="max_model_len"):
        simulate([], broken)


def test_an_empty_trace_is_an_empty_report() -> None:
    report = simulate([], config())
    assert report.num_steps == 0 and report.e2e_latency_s == Percentiles(0, 0, 0, 0, 0)
    assert report.to_dict()["num_finished"] == 0
