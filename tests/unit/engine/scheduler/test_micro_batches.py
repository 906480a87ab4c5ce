"""Several steps of different sequences in flight with pipeline stages give every request the same answer as one step.

The random scenes of `test_pipeline_depth.py`, also with refused steps and with drafts that are right or wrong. The fake
ranks read the whole history back through the block tables.
"""

from collections.abc import Callable

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.scheduler.sequence import SchedulerOutput
from oarlock.engine.types import FinishReason
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, answer, make_scene, run_scene
from tests.unit.engine.scheduler.test_refused_steps import now_and_then
from tests.unit.engine.spec_decode.test_speculation import Guesses, compare, texts_of, use

Refuses = Callable[[StepMetadata], bool]


class Watched(Driver):
    """Checks that no sequence whose token is being sampled is in another step."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.most_in_flight = 0
        self._sampled: dict[int, set[int]] = {}  # request ids, by step id

    def _check(self, output: SchedulerOutput, cached: dict[bytes, int]) -> None:
        super()._check(output, cached)
        assert output.decodes.token_ids.min(initial=0) >= 0
        items = output.items()
        in_flight = set().union(*(self._sampled[step.step_id] for step in self.in_flight))
        assert not {item.seq.request_id for item in items} & in_flight
        self._sampled[output.step_id] = {item.seq.request_id for item in items if item.wants_logits}
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight) + 1)


def run(scene: Scene, stages: int, refuses: Refuses | None = None) -> Watched:
    def make(config: EngineConfig, num_blocks: int, faults: Faults, window: int | None) -> Watched:
        if refuses is not None:
            faults.refuses = refuses
        return Watched(config, num_blocks, faults, window)

    return run_scene(scene, None, make, stages=stages)


def check_equal(scene: Scene, one: Driver, other: Driver) -> None:
    for number, request in one.requests.items():
        expected, got = answer(one, number), answer(other, number)
        if FinishReason.ABORT in (expected[3][0], got[3][0]):
            assert number in scene.aborts
            shorter, longer = sorted((expected[0], got[0]), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert got == expected, f"request {number}: {request.params}"


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.slow
def test_every_answer_is_that_of_one_stage(stages: int, seeds: range) -> None:
    ahead, steps, most = 0, 0, 0
    for seed in seeds:
        scene = make_scene(seed)
        one, got = run_scene(scene, 1), run(scene, stages)
        check_equal(scene, one, got)
        assert got.num_late_masks == 0
        ahead, steps, most = ahead + got.num_ahead, steps + got.executor.num_steps, max(most, got.most_in_flight)
    assert ahead > steps / 3 and most == stages


@pytest.mark.parametrize("stages", [2, 3])
def test_a_preemption_waits_for_what_is_in_flight_and_nothing_else_does(stages: int) -> None:
    driver = Watched(make_config(max_num_seqs=6, stages=stages), num_blocks=30)
    for number in range(1, 7):
        driver.add(make_request(number, range(number, number + 9), max_tokens=40))
    driver.run().check_outputs()
    assert driver.scheduler.stats.num_preemptions > 3
    assert driver.num_ahead > 0.6 * driver.executor.num_steps


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.soak)], ids=["few", "many"])
@pytest.mark.slow
def test_refused_steps_change_no_answer(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.GROW_AFTER_STEPS", 3)
    refused = ahead = 0
    for seed in seeds:
        scene = make_scene(seed)
        plenty, short = run_scene(scene, 1), run(scene, 3, now_and_then)
        check_equal(scene, plenty, short)
        refused, ahead = refused + short.executor.num_refused, ahead + short.num_ahead
        assert short.executor.num_refused <= 3 * short.scheduler.stats.num_refused_steps
    assert refused > 10 * len(seeds) and ahead > 5 * len(seeds)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_drafts_change_no_answer(stages: int) -> None:
    accepted = ahead = 0
    for seed in range(5):
        scene = make_scene(seed)
        expected = run_scene(scene, 1)
        drafter = Guesses(texts_of(expected), seed)
        got = run_scene(scene, None, lambda *arguments, by=drafter: use(Driver(*arguments), by), stages=stages)
        compare(scene, expected, got)
        accepted, ahead = accepted + got.scheduler.stats.num_accepted_draft_tokens, ahead + got.num_ahead
    assert accepted > 40 and ahead > 40


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_decodes_are_dealt_equally(stages: int) -> None:
    """Once all prompts are computed, each step holds a share of the sequences, and each sequence has its turn."""
    driver = Watched(make_config(max_num_seqs=11, max_num_batched_tokens=64, stages=stages), num_blocks=200)
    for number in range(1, 12):
        driver.add(make_request(number, range(number, number + 4), max_tokens=50))
    sizes, lengths = [], []
    for turn in range(40 * stages):
        driver.step()
        if turn > 4 * stages:
            sizes.append(driver.in_flight[-1].num_seqs)
            lengths.append([len(tokens) for tokens in driver.tokens.values()])
    assert max(sizes) == -(-11 // stages) and sum(sizes) / len(sizes) == pytest.approx(11 / stages, rel=0.05)
    assert np.ptp(lengths, axis=1).max() <= 2
    driver.run().check_outputs()


def test_a_long_prompt_is_in_every_stage() -> None:
    """Its next chunk follows at once, and one sequence that decodes has its turn in between."""
    driver = Watched(make_config(max_num_batched_tokens=8, stages=4), num_blocks=100)
    driver.add(make_request(1, range(3), max_tokens=30))
    while len(driver.tokens[1]) < 2:
        driver.step()
    driver.add(make_request(2, range(50), max_tokens=2))
    while not driver.tokens[2]:
        driver.step()
    assert driver.most_in_flight == 4
    driver.run().check_outputs()


def test_a_request_fails_to_be_built_while_answers_are_to_come() -> None:
    driver = Watched(make_config(stages=3, block_size=2, max_num_batched_tokens=8), num_blocks=60)
    driver.add(make_request(1, range(30), max_tokens=4))
    driver.add(make_request(2, range(30), max_tokens=4))
    for _ in range(2):
        driver.begin()
    driver.begin(num_withdrawn=1)
    driver.run()
    assert [number for number, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR] == [1]
    driver.check_outputs()
    driver.check_idle()


def test_steps_one_after_the_other_hold_all_sequences() -> None:
    driver = Driver(make_config(stages=2, pipeline_depth=1))
    for number in range(1, 7):
        driver.add(make_request(number, range(number, number + 4), max_tokens=5))
    driver.run().check_outputs()
    assert driver.executor.num_steps == 5 and driver.num_ahead == 0
