"""Slow masks: which sequences sit out a step, and that neither this nor a postponed mask changes an answer."""

import random
from dataclasses import replace

import numpy as np
import pytest

from oarlock.engine.errors import BrokenGrammarError, MaskPostponedError
from oarlock.engine.input_batch.sampling_metadata import fill_one_by_one
from oarlock.engine.scheduler.decode_state import DecodeState
from oarlock.engine.scheduler.mask_budget import GRAMMARS_ONLY_S, MIN_S, MaskBudget
from oarlock.engine.types import Grammar
from tests.unit.engine.engine_fakes import Driver, make_config, make_request
from tests.unit.engine.sampling_fakes import CountingGrammar
from tests.unit.engine.scheduler.test_pipeline_depth import answer, make_scene, run_scene

DRAW = random.Random("masks")


class HostileMasks(Driver):
    """Masks are expected to be slow at random, and some of each step's are postponed."""

    num_postponed = 0

    def fill_masks(self, rows):
        results = fill_one_by_one(rows)
        for number in range(1, len(results)):
            if DRAW.random() < 0.2:
                results[number] = MaskPostponedError()
                HostileMasks.num_postponed += 1
        return results


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_postponed_and_slow_masks_change_no_answer(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    scenes, num_before = [make_scene(seed) for seed in range(12)], HostileMasks.num_postponed
    for scene in scenes:  # many grammars, and no aborts, which come at different tokens
        scene.aborts.clear()
        arrivals = [(when, request) for when, request in scene.arrivals if request.params.grammar is not None]
        more = [(when + 5, replace(request, request_id=request.request_id + 100)) for when, request in arrivals]
        scene.arrivals += more
    plain = [run_scene(scene, depth) for scene in scenes]
    monkeypatch.setattr(CountingGrammar, "expected_s", property(lambda _: DRAW.choice([0.0, 0.001, 0.2])))
    for scene, expected in zip(scenes, plain, strict=True):
        # The state keeps a cost that is drawn, which would be another for the audit.
        monkeypatch.setattr(DecodeState, "audit", lambda *_: None)
        got = run_scene(scene, depth, HostileMasks)
        for number, request in expected.requests.items():
            assert answer(got, number)[:4] == answer(expected, number)[:4], (number, request)
    assert HostileMasks.num_postponed > num_before + 10


def state_of(mask_s: list[float], last_token_s: list[float]) -> DecodeState:
    state = DecodeState(len(mask_s), 4, caches_blocks=False)
    state.mask_s[:], state.last_token_s[:] = mask_s, last_token_s
    state.num_tokens[:], state.num_computed[:] = 5, 4
    return state


def test_sequences_with_slow_masks_take_turns_and_the_others_run_in_each_step() -> None:
    mask_s = [0.0, 0.009, 0.009, 0.009]
    state, budget = state_of(mask_s, [1.0, 1.2, np.nan, 1.1]), MaskBudget()
    rows, chosen = np.arange(4), []
    for step in range(8):
        got = budget.choose(state, rows, any_waiting=False).tolist()
        assert got[0] == 0 and sum(mask_s[row] for row in got) < MIN_S + 2 * 0.009
        state.last_token_s[got] = 2.0 + step
        chosen += got[1:]
    assert chosen[:3] == [2, 3, 1], "the one without a token first, then by the time of the last one"
    assert 6 <= len(chosen) <= 10 and {1, 2, 3} == set(chosen[:3]) == set(chosen[3:6])


def test_a_mask_that_takes_longer_than_the_time_of_a_step_waits_until_it_was_saved_up() -> None:
    state, budget = state_of([0.0, 0.1], [1.0, 1.0]), MaskBudget()
    steps = [len(budget.choose(state, np.arange(2), any_waiting=False)) for _ in range(40)]
    assert 3 <= steps.count(2) <= 5, "a tenth of the steps"


@pytest.mark.parametrize("mask_s", [0.004, 10 * GRAMMARS_ONLY_S])
def test_slow_sequences_among_themselves_are_never_without_a_step(mask_s: float) -> None:
    state, budget = state_of([mask_s] * 20, [1.0] * 20), MaskBudget()
    counts = {len(budget.choose(state, np.arange(20), any_waiting=any_waiting)) for any_waiting in (False, True) * 9}
    assert min(counts) >= 1 and max(counts) <= 1 + GRAMMARS_ONLY_S / mask_s


def test_long_steps_leave_more_time_for_masks() -> None:
    state, budget = state_of([0.0] + [0.011] * 9, [1.0] * 10), MaskBudget()
    for _ in range(100):
        budget.observe(0.08, 0.05)
    assert len(budget.choose(state, np.arange(10), any_waiting=False)) == 1 + 3


@pytest.mark.parametrize("method", ["accept", "fill_masks"])
def test_a_broken_grammar_is_the_fault_of_its_request_and_writes_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    def broken(*_):
        raise BrokenGrammarError("too many items")

    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2], grammar=Grammar("lark", "9", "guided_grammar")))
    driver.add(make_request(2, [1, 2], max_tokens=4))
    monkeypatch.setattr(driver.scheduler.requests.by_id[1].grammar_matcher, method, broken, raising=True)
    driver.run()
    end = driver.ends[1]
    assert (end.error_param, end.error_code) == ("guided_grammar", "grammar_failed")
    assert end.error is not None and "guided_grammar" in end.error and "too many items" in end.error
    assert len(driver.tokens[2]) > 0 and driver.ends[2].error is None
    assert driver.scheduler.stats.num_errors == 0 and "Traceback" not in caplog.text
