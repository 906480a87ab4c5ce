"""Too little memory and too many urgent requests: no request starves, preemptions are bounded, the pool stays full."""

import math
import random
from dataclasses import replace
from functools import cache
from itertools import count, takewhile

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.scheduler.scheduler import PRIORITY_STEP_S
from oarlock.engine.simulated_ranks import CostModel
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import Arrival, SimulationConfig, Watch, simulate

BLOCK = 32
CONTEXT = 4096
POOL = CONTEXT * 3 // 2 // BLOCK  # blocks


def config(
    *, num_blocks: int = POOL + 1, seqs: int = 32, waiting: int = 5000, step_s: float = 0.02
) -> SimulationConfig:
    worker = WorkerConfig(
        "none", max_model_len=CONTEXT, max_num_seqs=seqs, max_num_batched_tokens=512, block_size=BLOCK
    )
    engine = EngineConfig(worker, max_waiting_requests=waiting, max_waiting_tokens=10**8)
    return SimulationConfig(engine, num_blocks=num_blocks, cost=CostModel(step_s=step_s))


def chat(count: int, prompt: int, output: int, *, seed: int = 1, varied: bool = True) -> list[Arrival]:
    """Requests of these mean lengths, all at once, whose `max_tokens` is the whole context."""
    rng = random.Random(seed)

    def length(mean: int, most: int) -> int:
        return min(most, 1 + int(rng.expovariate(1 / mean))) if varied else mean

    arrivals = []
    for _ in range(count):
        tokens = tuple(rng.randrange(32_000) for _ in range(length(prompt, CONTEXT // 2)))
        arrivals.append(Arrival(0.0, tokens, length(output, CONTEXT // 2), max_tokens=CONTEXT - len(tokens)))
    return arrivals


def steps_of_a_full_pool(arrivals: list[Arrival]) -> float:
    """Steps if every block were always in use until the last answers are left: each request holds its blocks for as
    many steps as it has tokens."""
    held = sum((len(a.prompt_token_ids) + a.num_output_tokens / 2) * a.num_output_tokens for a in arrivals)
    return held / (POOL * BLOCK) + max(a.num_output_tokens for a in arrivals)


MIXES = {
    "answers of one length": chat(70, 30, 250, varied=False),
    "answers of many lengths": chat(90, 30, 300),
    "long prompts": chat(40, 400, 300),
    "few long among many short": [*chat(100, 40, 100), *chat(25, 40, 800, seed=3)],
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.slow
def test_a_pool_that_is_too_small_is_used_and_preemptions_are_bounded(name: str) -> None:
    arrivals = MIXES[name]
    random.Random(5).shuffle(arrivals)
    report = simulate(arrivals, config(seqs=48))
    assert report.num_finished == len(arrivals) and report.num_errors == 0
    assert report.num_steps <= 1.1 * steps_of_a_full_pool(arrivals)
    # Preemption needs growth, and each one of a sequence doubles what must be free before it comes back.
    generated = sum(a.num_output_tokens for a in arrivals)
    assert 0 < report.num_preemptions <= generated / BLOCK
    assert report.max_preemptions_of_one <= 3 < math.log2(POOL)
    tokens = generated + sum(len(a.prompt_token_ids) for a in arrivals)
    assert report.num_tokens_computed <= 1.3 * tokens


def first_token_s(arrivals: list[Arrival], settings: SimulationConfig, number: int) -> float:
    watch = Watch()
    simulate(arrivals, settings, watch)
    return watch.first_s[number] - watch.arrived_s[number]


@pytest.mark.parametrize("tokens", [CONTEXT - 50, CONTEXT // 2])
@pytest.mark.slow
def test_a_stream_without_end_hardly_delays_an_earlier_request(tokens: int) -> None:
    """A long prompt in an overloaded engine: shorter ones that come later get half of each step at most."""
    before = [replace(a, time_s=0.1 * n) for n, a in enumerate(chat(60, 100, 100))]
    probe = Arrival(6.0, tuple(range(tokens)), 20)
    after = [replace(a, time_s=6.01 + 0.1 * n) for n, a in enumerate(chat(150, 60, 60, seed=2))]
    undisturbed = first_token_s([*before, probe], config(), 61)
    assert undisturbed > 1.0  # there was a queue
    assert first_token_s([*before, probe, *after], config(), 61) <= undisturbed * 1.25


@pytest.mark.parametrize("num_long", [1, 2, 4])
def test_a_short_prompt_does_not_wait_for_long_ones(num_long: int) -> None:
    """It is computed in the step after the one that runs when it comes, beside the long ones."""
    long = [Arrival(0.001 * n, tuple(range(n, n + CONTEXT // 2)), 400) for n in range(num_long)]
    short = Arrival(0.7, tuple(range(9000, 9040)), 20)
    settings = config(num_blocks=8 * POOL)
    alone = first_token_s([replace(short, time_s=0.0)], settings, 1)
    assert first_token_s([*long, short], settings, num_long + 1) <= alone + 2 * settings.cost.token_s * 512


@cache
def streams_beside(prompts: tuple[int, ...], max_step_s: float | None) -> tuple[Watch, float]:
    """Eight answers that go on while `prompts` of these lengths come, two seconds apart; and the time that all take."""
    watch = Watch()
    streams = [Arrival(0.0, (n,), 1500) for n in range(1, 9)]
    long = [
        Arrival(4.0 + 2 * n, tuple(k % 32_000 for k in range(n, n + tokens)), 1) for n, tokens in enumerate(prompts)
    ]
    worker = WorkerConfig("none", max_model_len=40_000, max_num_seqs=16, max_num_batched_tokens=2048, block_size=BLOCK)
    settings = SimulationConfig(EngineConfig(worker, max_step_s=max_step_s), num_blocks=8192)
    return watch, simulate([*streams, *long], settings, watch).duration_s


@pytest.mark.parametrize("prompts", [(4096,), (4096,) * 8, (32_768, 4096, 4096)], ids=str)
@pytest.mark.slow
def test_prompts_hold_up_no_answer_for_long(prompts: tuple[int, ...]) -> None:
    """Chunks are as large as the measured time of steps allows, which costs hardly any throughput."""
    idle, _ = streams_beside((), None)
    unlimited, fastest_s = streams_beside(prompts, 1e9)
    limited, duration_s = streams_beside(prompts, None)
    assert max(unlimited.itl_s) > 20 * np.median(idle.itl_s)
    assert np.percentile(limited.itl_s, 99) <= 3 * np.percentile(idle.itl_s, 50)
    assert max(limited.itl_s) <= 4 * max(idle.itl_s)  # the first chunks come before a token's time is known
    assert duration_s <= 1.1 * fastest_s


@pytest.mark.slow
def test_a_given_limit_of_steps_is_kept() -> None:
    watch, _ = streams_beside((4096,), 0.1)
    assert 0.08 < max(watch.itl_s) <= 0.11


@pytest.mark.slow
def test_a_preempted_request_ends_about_as_soon_as_without_later_requests() -> None:
    """Later requests may be admitted before a preempted one, but only a few."""
    before = chat(40, 30, 250, varied=False)
    after = [replace(a, time_s=0.5 + 0.2 * n) for n, a in enumerate(chat(100, 30, 30, seed=2))]
    alone, disturbed = Watch(), Watch()
    assert simulate(before, config(), alone).num_preemptions > 10
    simulate([*before, *after], config(), disturbed)
    for number in range(1, len(before) + 1):
        assert disturbed.last_s[number] <= alone.last_s[number] * 1.35


@pytest.mark.parametrize("num_blocks", [POOL + 1, CONTEXT // BLOCK + 1])
@pytest.mark.slow
def test_the_least_urgent_request_is_served_within_the_bound(num_blocks: int) -> None:
    """Twenty levels of priority are worth twenty times as much waiting; what came within it is served first."""
    window = 20 * PRIORITY_STEP_S
    rng = random.Random(7)
    times = takewhile(lambda now: now < 2.0 * window, (4.0 * number for number in count()))
    urgent = [Arrival(now, tuple(rng.randrange(32_000) for _ in range(40)), 60, -10, 500) for now in times]
    probe = Arrival(50.0, tuple(range(300)), 30, 10, 1000)
    arrivals = sorted([*urgent, probe], key=lambda arrival: arrival.time_s)
    number = arrivals.index(probe) + 1
    settings = config(num_blocks=num_blocks, seqs=4, waiting=8, step_s=0.5)
    watch = Watch()
    report = simulate(arrivals, settings, watch)
    assert report.num_rejected > 50  # more come than can be served
    waited = watch.first_s[number] - watch.arrived_s[number]
    assert 0.5 * window < waited <= window + 12 * 60 * 1.0  # the queue at that time: 12 requests of 60 steps, in fours
    assert watch.last_s[number] - watch.first_s[number] <= 3 * 30 * 1.0
