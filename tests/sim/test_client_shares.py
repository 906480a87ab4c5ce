"""Clients with separate keys: one that asks for too much hardly delays the others, and gets all that they leave."""

import random
from dataclasses import replace

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.simulated_ranks import CostModel
from oarlock.engine.structured_output.manager import CompileJobs
from oarlock.engine.types import Grammar
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import Arrival, SimulationConfig, Watch, simulate

BLOCK = 32
SEQS = 16


def config(*, num_blocks: int = 4096, waiting: int = 64) -> SimulationConfig:
    worker = WorkerConfig("none", max_model_len=4096, max_num_seqs=SEQS, max_num_batched_tokens=2048, block_size=BLOCK)
    engine = EngineConfig(worker, max_waiting_requests=waiting)
    return SimulationConfig(engine, num_blocks=num_blocks, cost=CostModel(step_s=0.02, token_s=0.0004))


def requests(client: str, per_s: float, until_s: float, prompt: int, output: int, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    while (now := now + rng.expovariate(per_s)) < until_s:
        tokens = tuple(rng.randrange(32_000) for _ in range(prompt))
        arrivals.append(Arrival(now, tokens, 1 + int(rng.expovariate(1 / output)), client=client, max_tokens=2000))
    return arrivals


def first_tokens_of(client: str, arrivals: list[Arrival], settings: SimulationConfig) -> list[float]:
    """Seconds until the first token of each of its requests; all of them must be answered."""
    watch = Watch()
    arrivals = sorted(arrivals, key=lambda arrival: arrival.time_s)
    simulate(arrivals, settings, watch)
    numbers = [number for number, arrival in enumerate(arrivals, 1) if arrival.client == client]
    return [watch.first_s[number] - watch.arrived_s[number] for number in numbers]


UNTIL_S = 40
QUIET = requests("quiet", 0.5, UNTIL_S, 60, 60, 1)


@pytest.mark.parametrize(
    "num_blocks",
    [pytest.param(4096, id="rows are scarce", marks=pytest.mark.soak), pytest.param(160, id="blocks are scarce")],
)
@pytest.mark.slow
def test_a_flood_of_one_client_delays_another_by_less_than_twice(num_blocks: int) -> None:
    """Beside ten times what the engine can do, and beside as much as is the other's share."""
    settings = config(num_blocks=num_blocks)
    fair = first_tokens_of("quiet", [*QUIET, *requests("loud", 1.6, UNTIL_S, 200, 200, 2)], settings)
    flooded = first_tokens_of("quiet", [*QUIET, *requests("loud", 30.0, UNTIL_S, 200, 200, 2)], settings)
    assert np.percentile(flooded, 95) <= 2 * np.percentile(fair, 95)
    assert np.mean(flooded) <= 2 * np.mean(fair)
    one_queue = [replace(arrival, client="all") for arrival in (*QUIET, *requests("loud", 4.0, UNTIL_S, 200, 200, 2))]
    unshared = Watch()
    simulate(sorted(one_queue, key=lambda arrival: arrival.time_s), settings, unshared)
    assert np.mean(unshared.ttft_s) > 5 * np.mean(flooded)  # there is something to be fair about


@pytest.mark.slow
def test_a_client_alone_has_everything() -> None:
    arrivals = requests("only", 30.0, 6, 60, 60, 3)
    report = simulate(arrivals, config(waiting=4096))
    assert report.max_running == SEQS
    assert report.num_preemptions == 0
    unnamed = simulate([replace(arrival, client="") for arrival in arrivals], config(waiting=4096))
    assert report == unnamed


@pytest.mark.slow
def test_two_that_flood_share_evenly_whatever_they_ask_for() -> None:
    """One with long prompts and answers, the other with short ones: as much work for both while both wait."""
    settings = config(waiting=4096, num_blocks=8192)
    arrivals = [*requests("long", 8.0, 30, 400, 100, 4), *requests("short", 40.0, 30, 40, 20, 5)]
    arrivals.sort(key=lambda arrival: arrival.time_s)
    watch = Watch()
    simulate(arrivals, settings, watch)
    work = {"long": 0.0, "short": 0.0}
    for number, arrival in enumerate(arrivals, 1):
        if watch.last_s[number] < 25.0:
            work[arrival.client] += len(arrival.prompt_token_ids) + 2 * arrival.num_output_tokens
    assert 0.7 < work["long"] / work["short"] < 1.4


@pytest.mark.slow
def test_the_more_urgent_of_one_client_go_first_and_do_not_pass_another_client() -> None:
    loud = [Arrival(0.001 * n, tuple(range(n, n + 50)), 100, client="loud", priority=-10) for n in range(200)]
    mild = [Arrival(0.5 + 0.001 * n, tuple(range(n, n + 50)), 10, client="mild", priority=10) for n in range(4)]
    urgent = [Arrival(0.6, tuple(range(70)), 10, client="mild", priority=-10)]
    watch = Watch()
    arrivals = [*loud, *mild, *urgent]
    arrivals.sort(key=lambda arrival: arrival.time_s)
    simulate(arrivals, config(waiting=4096), watch)
    firsts = {arrival: watch.first_s[number] for number, arrival in enumerate(arrivals, 1)}
    assert max(firsts[arrival] for arrival in (*mild, *urgent)) < 1.5
    assert sum(firsts[arrival] > 1.5 for arrival in loud) > 150


@pytest.mark.slow
def test_a_full_queue_takes_those_who_have_less_than_their_share_of_it() -> None:
    loud = [Arrival(0.0, tuple(range(n, n + 50)), 50, client="loud") for n in range(500)]
    quiet = [Arrival(0.5, tuple(range(n, n + 50)), 50, client="quiet") for n in range(40)]
    watch = Watch()
    report = simulate([*loud, *quiet], config(waiting=64), watch)
    assert report.num_finished == 64 + SEQS + 32  # of a queue of 64, each has a half
    assert report.num_rejected == 540 - report.num_finished
    assert report.num_errors == 0


def compile_times_s(jobs: list[tuple[float, str, float]], num_threads: int) -> dict[str, list[float]]:
    """Seconds from asking for a grammar to its end, of each client, where threads in virtual time take them.

    `jobs`: (when it is asked for, client, seconds that it takes), in the order of their times.
    """
    queue, asked, found, left = CompileJobs(num_threads), {}, {client: [] for _, client, _ in jobs}, list(jobs)
    running: list[tuple[float, str, float]] = []  # when each ends, whose turn it took, its seconds
    while left or len(queue) or running:
        now = min([at for at, *_ in running] + [at for at, *_ in left[:1]])
        for end in [one for one in running if one[0] <= now]:
            running.remove(end)
            queue.done(*end[1:])
        while left and left[0][0] <= now:
            asked[str(len(asked))] = left.pop(0)
            queue.put(Grammar("regex", str(len(asked) - 1)), asked[str(len(asked) - 1)][1])
        while len(running) < num_threads and queue.next_client is not None and (taken := queue.get()) is not None:
            at, client, seconds = asked[taken[1].text]
            running.append((now + seconds, taken[0], seconds))
            found[client].append(now + seconds - at)
    return found


def test_slow_grammars_of_one_client_delay_those_of_another_by_one_of_them() -> None:
    """At first; then the slow ones have one thread, and the quick ones wait for none."""
    slow = [(0.0, "loud", 2.0)] * 100
    quick = [(float(second) + 0.5, "quiet", 0.01) for second in range(60)]
    found = compile_times_s(sorted(slow + quick), num_threads=2)
    assert len(found["quiet"]) == 60 and found["quiet"][0] <= 1.52
    assert max(found["quiet"][4:]) == pytest.approx(0.01)
    assert len(found["loud"]) == 100 and max(found["loud"]) <= 202.0


def test_quick_grammars_of_one_client_have_all_threads() -> None:
    found = compile_times_s([(0.0, "only", 0.1)] * 40, num_threads=2)
    assert max(found["only"]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("client", "num_blocks"),
    [pytest.param("", 4096, id="rows are scarce"), pytest.param("other", 400, id="blocks are scarce")],
)
@pytest.mark.slow
def test_nobody_waits_behind_requests_that_yield(client: str, num_blocks: int) -> None:
    """Neither for a row, nor for blocks, nor for a long prompt under way; however much its client has had before."""
    settings = config(num_blocks=num_blocks)
    rng = random.Random(3)
    before = [Arrival(0.0, tuple(rng.randrange(32_000) for _ in range(2000)), 200, client=client) for _ in range(4)]
    batch = [
        Arrival(1.0, tuple(rng.randrange(32_000) for _ in range(2500)), 300, 10, client="", is_low_priority=True)
        for _ in range(24)
    ]
    probes = [
        Arrival(time_s, tuple(rng.randrange(32_000) for _ in range(1500)), 5, client=client) for time_s in (8, 16)
    ]

    def waits(arrivals: list[Arrival]) -> list[float]:
        watch = Watch()
        report = simulate(arrivals, settings, watch)
        assert report.num_finished == len(arrivals) and report.num_errors == 0
        numbers = [number for number, arrival in enumerate(arrivals, 1) if arrival in probes]
        return [watch.first_s[number] - watch.arrived_s[number] for number in numbers]

    alone = max(waits([*before, *probes]))
    beside = max(waits([*before, *batch, *probes]))
    step_s = settings.cost.step_s + settings.cost.token_s * 2048
    assert beside <= alone + 2 * step_s
    unyielding = waits([*before, *(replace(one, is_low_priority=False) for one in batch), *probes])
    assert max(unyielding) > 1.5 * beside
