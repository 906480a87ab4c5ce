"""Prefixes that several requests share: found in the cache, or computed in the same step."""

import pytest

from oarlock.engine.types import FinishReason
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request


def step(driver: Driver) -> dict[int, int]:
    """Run a step; return how many tokens each request has in it."""
    assert driver.step() is not None
    return {item.seq.request_id: item.num_tokens for item in driver.items}


@pytest.mark.parametrize("caching", [True, False])
def test_a_cached_prefix_changes_nothing_but_the_work(caching: bool) -> None:
    driver = Driver(make_config(enable_prefix_caching=caching))
    driver.add(make_request(1, range(20), max_tokens=4))
    driver.run()
    driver.add(make_request(2, [*range(20), 50, 51], max_tokens=4))
    driver.step()
    assert driver.items[0].start == (20 if caching else 0)
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == (20 if caching else 0)
    assert driver.scheduler.stats.prefix_cache_hits == (20 if caching else 0)
    assert driver.scheduler.stats.prefix_cache_queries == 42
    driver.check_idle()


@pytest.mark.parametrize("budget", [7, 32, 100, 1024])
@pytest.mark.parametrize("num_others", [0, 3])
def test_equal_prompts_cost_one(budget: int, num_others: int) -> None:
    """However the budget cuts the first: of each other only the last block is computed, and held, again."""
    driver = Driver(make_config(max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=256), num_blocks=200)
    for number in range(num_others):  # decodes that take their part of the budget
        driver.add(make_request(100 + number, [50 + number], max_tokens=100))
    driver.step()
    prompt = range(128)
    for number in range(1, 9):
        driver.add(make_request(number, [token % 60 for token in prompt], max_tokens=2))
    computed = most_held = 0
    while driver.scheduler.num_waiting or any(number not in driver.ends for number in range(1, 9)):
        output = driver.begin()
        computed += sum(item.num_tokens for item in driver.items if item.seq.request_id < 9 and item.start < 128)
        most_held = max(most_held, driver.scheduler.memory.num_held)
        driver.finish(output)
    assert computed == 128 + 7 * 4
    assert most_held <= 31 + 8 * 2 + num_others * 25
    driver.run().check_outputs()
    cached = [driver.ends[number].num_cached_tokens for number in range(1, 9)]
    assert cached == [0] + [124] * 7
    driver.check_idle()


def test_eight_choices_of_a_long_prompt_in_one_step() -> None:
    config = make_config(max_num_seqs=8, max_num_batched_tokens=8192, block_size=32, max_model_len=2048)
    driver = Driver(config, num_blocks=400)
    for number in range(8):
        driver.add(make_request(number, [token % 60 for token in range(1024)], max_tokens=2))
    driver.step()
    assert [item.num_tokens for item in driver.items] == [1024] + [32] * 7
    assert driver.step() is not None
    assert driver.scheduler.stats.prefix_cache_hits == 7 * 992
    driver.check_outputs()


def test_blocks_of_an_aborted_sequence_in_flight_are_shared() -> None:
    driver = Driver(make_config(max_num_batched_tokens=16))
    driver.add(make_request(1, range(30), max_tokens=4))
    output = driver.begin()
    driver.abort(1)
    driver.finish(output)
    driver.add(make_request(2, range(30), max_tokens=4))
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 16
    driver.check_idle()


def test_generated_tokens_are_shared_as_well() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, range(10), max_tokens=10))
    driver.run()
    driver.add(make_request(2, [*range(10), *driver.tokens[1], 3], max_tokens=2))
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 16  # the last generated token has no KV, its block is not full


def test_logits_that_are_not_finite_end_those_who_share_no_more_than_their_prompt() -> None:
    driver = Driver(make_config(), faults=Faults(poisoned_seeds=(1,)))
    for number in (1, 2, 3):
        driver.add(make_request(number, range(10), max_tokens=6))
    driver.run().check_outputs()
    assert [driver.ends[number].finish_reason for number in (1, 2, 3)] == [
        FinishReason.ERROR,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    driver.add(make_request(4, range(10), max_tokens=1))
    driver.run()
    assert driver.ends[4].num_cached_tokens == 0
    driver.check_idle()


def test_sequences_that_share_withdrawn_blocks_wait_again() -> None:
    """The second and third found the first one's blocks in a step that the first did not stay in."""
    driver = Driver(make_config(max_num_batched_tokens=64))
    for number, tail in ((1, 40), (2, 41), (3, 41)):
        driver.add(make_request(number, [*range(12), *[tail] * 9], max_tokens=6))
    driver.add(make_request(9, [60, 61], max_tokens=6))
    output = driver.begin(num_withdrawn=1)
    assert (
        output is not None
        and [item.seq.request_id for item in output.items()] == [9]
        and driver.ends[1].finish_reason is FinishReason.ERROR
    )
    driver.finish(output)
    assert step(driver) == {9: 1, 2: 21, 3: 1}
    driver.run().check_outputs()
    driver.check_idle()
