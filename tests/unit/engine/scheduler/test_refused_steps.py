"""Steps that the ranks refuse for lack of memory are tried again, smaller, and answers do not change."""

from collections.abc import Callable

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import OUT_OF_MEMORY
from oarlock.engine.scheduler.refused_steps import GROW_AFTER_STEPS, MAX_REFUSALS
from oarlock.engine.types import FinishReason
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, answer, make_scene, run_scene

Refuses = Callable[[StepMetadata], bool]


def run(scene: Scene, depth: int, refuses: Refuses) -> Driver:
    def make(config: EngineConfig, num_blocks: int, faults: Faults, window: int | None) -> Driver:
        faults.refuses = refuses
        return Driver(config, num_blocks, faults, window)

    return run_scene(scene, depth, make)


def now_and_then(step: StepMetadata) -> bool:
    return step.step_id % 9 == 2 or step.num_tokens > 14


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.slow
def test_every_answer_is_that_of_enough_memory(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """Chunks of prompts, shared prefixes, windows, penalties, grammars, preemptions and aborts among them."""
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.GROW_AFTER_STEPS", 3)
    refused = ahead = 0
    for seed in seeds:
        scene = make_scene(seed)
        plenty = run_scene(scene, 1)
        for depth in (1, 2):
            short = run(scene, depth, now_and_then)
            refused, ahead = refused + short.executor.num_refused, ahead + short.num_ahead
            counted = short.scheduler.stats.num_refused_steps  # not those behind a refused one
            assert counted <= short.executor.num_refused <= depth * counted
            for number, request in plenty.requests.items():
                expected, got = answer(plenty, number), answer(short, number)
                if FinishReason.ABORT in (expected[3][0], got[3][0]):
                    assert number in scene.aborts
                    shorter, longer = sorted((expected[0], got[0]), key=len)
                    assert longer[: len(shorter)] == shorter
                else:
                    assert got == expected, f"seed {seed}, request {number}: {request.params}"
    assert refused > 20 * len(seeds) and ahead > 5 * len(seeds)


def has_seed(step: StepMetadata, seed: int) -> bool:
    return seed in step.seeds.tolist()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_never_fits_fails_alone(depth: int) -> None:
    driver = Driver(make_config(pipeline_depth=depth), faults=Faults(refuses=lambda step: has_seed(step, 5)))
    for number in range(1, 9):
        driver.add(make_request(number, range(number, number + 9), max_tokens=40))
    driver.run()
    assert [number for number, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR] == [5]
    assert driver.ends[5].error == OUT_OF_MEMORY and driver.ends[5].error_code == "out_of_memory"
    assert driver.tokens[5] == []
    driver.check_outputs()
    driver.check_idle()
    assert driver.executor.num_refused <= 2 * depth * MAX_REFUSALS


@pytest.mark.parametrize("depth", [1, 2])
def test_when_not_even_one_token_fits_the_newest_fail_first(depth: int) -> None:
    is_short = [False]
    driver = Driver(make_config(pipeline_depth=depth), faults=Faults(refuses=lambda step: is_short[0]))
    for number in range(1, 7):
        driver.add(make_request(number, range(9), max_tokens=30))
    for _ in range(8):
        driver.step()
    is_short[0] = True
    while len(driver.ends) < 3:
        driver.step()
    is_short[0] = False
    driver.run()
    failed = [number for number, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR]
    assert failed == [6, 5, 4]
    driver.check_outputs()
    driver.check_idle()


def test_steps_grow_again_and_nobody_starves() -> None:
    """Six tokens fit at most, of eight sequences: the newest run when the oldest have ended."""
    most = [6]
    driver = Driver(make_config(), faults=Faults(refuses=lambda step: step.num_tokens > most[0]))
    for number in range(1, 9):
        driver.add(make_request(number, range(5), max_tokens=30))
    sizes = []
    while driver.scheduler.has_work:
        refused = driver.executor.num_refused
        output = driver.step()
        assert output is not None
        if driver.executor.num_refused == refused:
            sizes.append(len(output.items()))
        if len(driver.ends) == 4:
            most[0] = 100
    driver.check_outputs()
    assert all(end.finish_reason is FinishReason.LENGTH for end in driver.ends.values())
    assert driver.executor.num_refused <= 5 + len(sizes) / GROW_AFTER_STEPS
    driver.add(make_request(20, range(30), max_tokens=4))
    driver.run(4 * GROW_AFTER_STEPS)


def test_a_request_that_ends_while_its_step_is_refused_leaves_nothing_in_the_prefix_cache() -> None:
    refused = {1}
    driver = Driver(make_config(pipeline_depth=2), faults=Faults(refuses=lambda step: step.step_id in refused))
    driver.add(make_request(1, range(20)))
    driver.begin()
    driver.abort(1)
    driver.add(make_request(2, range(20)))  # would find the blocks of the first
    driver.begin()
    driver.finish()
    assert driver.scheduler.memory.num_cached == 0
    driver.run()
    driver.check_outputs()
    driver.check_idle()
