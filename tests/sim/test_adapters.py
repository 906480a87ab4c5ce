"""Many LoRA adapters in virtual time: turns of more adapters than slots, loads beside other requests, and leaks."""

import gc
import random
from dataclasses import replace

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.lora.registry import Adapter
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.simulated_ranks import CostModel, SimulatedExecutor, VirtualClock, replica_info
from oarlock.engine.stats import MAX_ADAPTER_LABELS
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import AdapterChange, Arrival, SimulationConfig, Watch, simulate

COST = CostModel(step_s=0.02, token_s=0.0004)


def config(*, max_loras: int = 2, max_cpu_loras: int = 16, loaded: int = 8, depth: int = 2) -> SimulationConfig:
    """The adapters `0` to `loaded - 1` are loaded at the begin."""
    worker = WorkerConfig(
        "none",
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
    )
    engine = EngineConfig(worker, max_waiting_requests=5000, pipeline_depth=depth)
    changes = tuple(AdapterChange(0.0, str(number), number) for number in range(loaded))
    return SimulationConfig(engine, num_blocks=2000, cost=COST, changes=changes)


def flow(adapter: str | None, per_s: float, until_s: float, output: int = 20, seed: int = 0) -> list[Arrival]:
    rng = random.Random(f"{adapter}{seed}")
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < until_s:
        tokens = tuple(rng.randrange(32_000) for _ in range(40))
        arrivals.append(Arrival(now, tokens, 1 + int(rng.expovariate(1 / output)), adapter=adapter))
    return arrivals


def waits(arrivals: list[Arrival], settings: SimulationConfig) -> dict[str | None, list[float]]:
    """Seconds until the first token of each request, by adapter; all of them must be answered."""
    watch, found = Watch(), dict[str | None, list[float]]()
    arrivals = sorted(arrivals, key=lambda arrival: arrival.time_s)
    report = simulate(arrivals, settings, watch)
    assert report.num_finished == len(arrivals) and not report.num_errors
    for number, arrival in enumerate(arrivals, 1):
        found.setdefault(arrival.adapter, []).append(watch.first_s[number] - watch.arrived_s[number])
    return found


@pytest.mark.parametrize("host", [16, pytest.param(2, marks=pytest.mark.more)])
@pytest.mark.slow
def test_eight_adapters_share_two_slots_fairly(host: int) -> None:
    """Two of them are asked for ten times as often as the others; `host`: adapters that fit into host memory."""
    arrivals = [one for name in "01" for one in flow(name, 1.0, 120)]
    arrivals += [one for name in "234567" for one in flow(name, 0.1, 120)]
    found = waits(arrivals, config(max_cpu_loras=host))
    often, seldom = (np.concatenate([found[name] for name in names]) for names in ("01", "234567"))
    assert len(seldom) > 40
    assert seldom.mean() <= 2 * often.mean() + 1 and seldom.max() <= 2 * often.max() + 2


@pytest.mark.slow
def test_a_flow_for_one_adapter_delays_another_by_an_answer() -> None:
    """The only slot is free when the running requests have ended: at most 50 tokens of 27 ms each."""
    steady = [Arrival(0.1 * number, (1, 2, 3, number), 50, adapter="0") for number in range(400)]
    others = [Arrival(at_s, (7, 8), 10, adapter="1") for at_s in (5.0, 15.0, 25.0)]
    found = waits(steady + others, config(max_loras=1, loaded=2))
    assert max(found["1"]) <= 1.7 and max(found["0"]) <= 4.0


@pytest.mark.slow
def test_loads_delay_no_other_request() -> None:
    """A stream of loads and of requests that wait for them: other requests share only the steps with them."""
    base = flow(None, 2.0, 30, output=60)
    alone, beside = Watch(), Watch()
    simulate(base, config(loaded=0), alone)
    settings = config(loaded=0)
    changes = [AdapterChange(0.3 * number, f"a{number}", number) for number in range(1, 90)]
    changes += [AdapterChange(0.3 * number + 2.0, f"a{number}") for number in range(1, 80)]
    settings = replace(settings, changes=tuple(sorted(changes, key=lambda change: change.time_s)))
    simulate(base, settings, beside)
    assert np.percentile(beside.itl_s, 99) <= 1.05 * np.percentile(alone.itl_s, 99)
    assert np.percentile(beside.ttft_s, 99) <= 1.2 * np.percentile(alone.ttft_s, 99) + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_random_scenes_end_and_repeat_to_the_last_digit(seed: int) -> None:
    """Adapters are loaded, unloaded and loaded with other contents while they are asked for."""
    rng = random.Random(seed)
    names = [str(number) for number in range(6)]
    changes = []
    for name in names:
        now, number = 0.0, int(name)
        while now < 40.0:
            changes.append(AdapterChange(now, name, number))
            now, number = now + rng.uniform(5, 15), number + 10
            if now < 35.0:
                changes.append(AdapterChange(now, name))
                now += rng.uniform(0.0, 0.5)
            else:
                break
    arrivals = [one for name in (*names, None) for one in flow(name, 1.0, 40, seed=seed)]
    arrivals.sort(key=lambda arrival: arrival.time_s)
    settings = config(max_loras=rng.choice([1, 2, 3]), max_cpu_loras=rng.choice([3, 5]), depth=rng.choice([1, 2]))
    settings = replace(settings, changes=tuple(sorted(changes, key=lambda change: change.time_s)))
    report = simulate(arrivals, settings)
    assert report.num_finished + report.num_rejected + report.num_errors == len(arrivals)
    assert report.num_finished > 0.5 * len(arrivals) and report.num_errors > 0
    assert report == simulate(arrivals, settings)


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
def test_loads_and_unloads_leave_nothing(count: int) -> None:
    """Each with a request, half of them unloaded while it runs or waits."""
    settings = config(loaded=0).engine
    clock, worker = VirtualClock(), settings.worker
    info = replica_info(worker, 500, 32_000)
    executor = SimulatedExecutor(worker, info, (COST,), clock, np.full(2000, 10, np.int64))
    core = EngineCore(settings, executor, clock)
    adapters = core.scheduler.adapters
    assert adapters is not None
    ends = 0
    for number in range(1, count + 1):
        name = f"adapter {number % 7}" if number % 3 else f"adapter {number}"
        adapters.add(name, number.to_bytes(16, "big").hex(), f"/{number}", clock())
        params = SamplingParams(max_tokens=5, seed=number)
        core.scheduler.add(Request(number, (1, 2, number), params, adapter=name), clock())
        for _ in range(number % 12 if number % 2 else 40):
            if core.begin() is None:
                clock.now_s += 0.01
            if core.num_in_flight:
                ends += sum(event.finish_reason is not None for event in core.finish())
            ends += len(core.take_events())
        ends += len(adapters.remove(name, list(core.scheduler.requests.by_id.values()), clock()))
        core.scheduler.audit()
    while core.num_in_flight or core.begin() is not None:
        core.finish()
    core.scheduler.requests.log.ended.clear()
    assert ends == count and not core.scheduler.has_work and not executor.adapters.loaded
    assert not adapters.registry.by_name and not adapters.registry.commands
    assert len(core.scheduler.stats.by_adapter) <= MAX_ADAPTER_LABELS + 1
    adapters.registry.outcomes.clear()
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) in (Adapter, Sequence)]
    assert len(left) <= 2, "adapters or sequences are kept"  # of the last step
