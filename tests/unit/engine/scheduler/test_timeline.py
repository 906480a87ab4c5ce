"""Timelines of requests: others ahead of them, chunks of their prompts, preemptions, stalls and ends."""

import pytest

from oarlock.engine.core.engine_core import history
from oarlock.engine.scheduler.step_cost import Stall, StepLog, difference
from oarlock.engine.scheduler.timeline import _MAX_CHUNKS, MAX_ENDED
from oarlock.engine.stats import RequestHistory
from tests.unit.engine.engine_fakes import Driver, make_config, make_request


def of(driver: Driver, request_id: int) -> RequestHistory:
    found = history(driver.scheduler, request_id)
    assert found is not None
    return found


def test_a_request_knows_whom_it_waits_for_and_why() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for number in (1, 2, 3, 4):
        driver.add(make_request(number, [number], max_tokens=3))
        if number == 4:
            assert [of(driver, one)["queue_position"] for one in (1, 2, 3, 4)] == [None, None, 0, 1]
        driver.step()
    third, fourth = of(driver, 3), of(driver, 4)
    assert (third["num_running"], third["num_waiting"], third["ahead"]) == (2, 0, [1, 2])
    assert (fourth["num_waiting"], fourth["ahead"]) == (1, [3])
    driver.run()
    third, fourth = of(driver, 3), of(driver, 4)
    assert third["without_row"] > 0 and third["without_blocks"] == 0
    assert fourth["first_scheduled_s"] is not None and fourth["first_scheduled_s"] > fourth["arrival_s"]
    assert fourth["reason"] == "length" and fourth["output_tokens"] == 3
    assert of(driver, 1)["without_row"] == 0, "the first one never waited"


def test_a_request_behind_one_that_finds_no_blocks_knows_that_memory_was_short() -> None:
    driver = Driver(make_config(), num_blocks=9)
    driver.add(make_request(1, range(20), max_tokens=6))
    driver.step()
    for number in (2, 3):
        driver.add(make_request(number, range(number, 20 + number), max_tokens=3))
    driver.run()
    for number in (2, 3):
        found = of(driver, number)
        assert found["without_blocks"] > 0 and found["without_row"] == 0


def test_chunks_of_a_prompt_are_counted_and_the_first_ones_shown() -> None:
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.add(make_request(1, range(25), max_tokens=2))
    driver.run()
    found = of(driver, 1)
    assert [chunk["tokens"] for chunk in found["chunks"]] == [10, 10, 5]
    assert (found["num_chunks"], found["computed_tokens"]) == (3, 25)
    driver.add(make_request(2, range(25), max_tokens=2))
    driver.run()
    assert of(driver, 2)["cached_tokens"] == 24
    driver = Driver(make_config(max_num_batched_tokens=1, max_num_seqs=1))
    driver.add(make_request(1, range(_MAX_CHUNKS + 8), max_tokens=2))
    driver.run()
    found = of(driver, 1)
    # The last token is computed in the same way as those of answers.
    assert (found["num_chunks"], len(found["chunks"])) == (_MAX_CHUNKS + 7, _MAX_CHUNKS)


def test_preemptions_have_their_times_and_what_was_computed_again_counts() -> None:
    driver = Driver(make_config(), num_blocks=12)
    for number in (1, 2):
        driver.add(make_request(number, range(number, number + 10), max_tokens=20))
    driver.run().check_outputs()
    preempted = [one for one in (of(driver, 1), of(driver, 2)) if one["num_preemptions"]]
    assert preempted and driver.scheduler.stats.num_preemptions == sum(one["num_preemptions"] for one in preempted)
    for one in preempted:
        assert len(one["preemptions"]) == one["num_preemptions"]
        for entry in one["preemptions"]:
            assert entry["is_short"]
            assert entry["back_s"] is not None and entry["back_s"] > entry["at_s"] > one["arrival_s"]
        assert one["computed_tokens"] > one["prompt_tokens"]


def test_open_requests_are_shown_too_and_of_those_that_ended_the_last_thousand() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1], max_tokens=20))
    driver.step()
    driver.step()
    found = of(driver, 1)
    assert (found["end_s"], found["reason"], found["output_tokens"]) == (None, None, 2)
    driver.abort(1)
    assert of(driver, 1)["reason"] == "abort"
    for number in range(2, MAX_ENDED + 2):
        driver.add(make_request(number, [1], max_tokens=1))
        driver.abort(number)
    assert history(driver.scheduler, 1) is None
    assert of(driver, 2)["reason"] == "abort" and len(driver.scheduler.requests.log.ended) == MAX_ENDED


def test_steps_met_by_a_request_are_the_difference_of_two_readings() -> None:
    steps = StepLog()
    steps.observe(0.0, 0.01, 9, 500)
    first = steps.read()
    for _ in range(3):
        steps.observe(1.0, 0.02, 1, 0)
    steps.observe(2.0, 0.04, 5, 30)
    num_steps, sequences, prompt_tokens, seconds, sizes = difference(first, steps.read())
    assert (num_steps, sequences, prompt_tokens) == (4, 8, 30)
    assert seconds == pytest.approx(0.1)
    assert sizes == {"1": 3, "4-7": 1}
    steps.observe(3.0, 0.01, 1 << 20, 0)
    assert difference(first, steps.read())[4]["32768 or more"] == 1


def test_stalls_are_long_steps_and_pauses_as_far_as_a_request_has_met_them() -> None:
    steps = StepLog()
    for step in range(20):
        steps.observe(step * 0.02, 0.02, 4, 0)
    assert not steps.stalls
    steps.observe(0.4, 1.0, 4, 700)  # a long step
    steps.observe(1.41, 0.02, 4, 0)
    steps.observe(3.43, 0.02, 4, 0)  # two seconds after the one before
    assert [(stall.kind, round(stall.seconds, 3)) for stall in steps.stalls] == [("step", 1.0), ("pause", 2.0)]
    assert [stall.kind for stall in steps.stalls_since(0.0, 8)] == ["step", "pause"]
    (late,) = steps.stalls_since(2.43, 8)
    assert late == Stall("pause", 2.43, pytest.approx(1.0), 0, 0)
    assert steps.stalls_since(3.40, 8) == [], "what was left of it is no stall"
    steps.refused(4.0)
    assert steps.stalls_since(3.9, 8)[-1].kind == "memory"
    assert len(steps.stalls_since(0.0, 1)) == 1


def test_a_pause_of_an_idle_engine_is_nobodys_stall() -> None:
    steps = StepLog()
    steps.observe(0.0, 0.02, 1, 0)
    steps.observe(500.0, 0.02, 1, 0)
    assert steps.stalls_since(499.99, 8) == []
