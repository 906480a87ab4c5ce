"""With a window on all layers a sequence holds the blocks that its later tokens read, and no others."""

import pytest

from oarlock.engine.errors import NOT_FINITE
from oarlock.workers.protocol import NULL_BLOCK
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request

WINDOW = 10  # blocks have four tokens: three or four are in the window
IN_WINDOW = 4


def driver_for(num_blocks: int = 60, **config) -> Driver:
    return Driver(make_config(max_model_len=200, **config), num_blocks, sliding_window=WINDOW)


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_answer_holds_its_window(caching: bool) -> None:
    driver = driver_for(enable_prefix_caching=caching)
    driver.add(make_request(1, [1, 2, 3], max_tokens=150))
    held = []
    while driver.scheduler.has_work:
        output = driver.begin()
        held.append(driver.scheduler.memory.num_held)
        (item,) = driver.items
        first_read = max(0, item.start - WINDOW + 1) // 4
        table = driver.executor.tables[0][0][0].tolist()
        assert all(block != NULL_BLOCK for block in table[first_read : item.start // 4 + 1])
        num_freed = max(0, first_read - 1)  # one more is, when the next block is taken
        assert table[:num_freed] == [NULL_BLOCK] * num_freed
        driver.finish(output)
    assert max(held) == IN_WINDOW
    driver.check_outputs()
    driver.check_idle()


def test_a_long_prompt_needs_room_for_its_window_and_a_step_only() -> None:
    driver = driver_for(num_blocks=51, max_num_batched_tokens=16)
    driver.add(make_request(1, [7] * 10, max_tokens=60))
    driver.step()
    driver.add(make_request(2, [number % 60 for number in range(180)], max_tokens=5))
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, driver.scheduler.memory.num_held)
    driver.check_outputs()
    assert most <= IN_WINDOW + (WINDOW + 2 * 16) // 4 + 1
    assert driver.scheduler.stats.num_preemptions == 0


def test_many_contexts_longer_than_the_pool_run_together() -> None:
    """Eight sequences of 160 tokens in a pool of 200, each with its window."""
    driver = driver_for(num_blocks=51)
    for number in range(1, 9):
        driver.add(make_request(number, [number] * 10, max_tokens=150))
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, driver.scheduler.num_running)
    assert most == 8 and driver.scheduler.stats.num_preemptions == 0
    driver.check_outputs()
    driver.check_idle()


def test_a_prefix_is_found_by_its_last_window() -> None:
    driver = driver_for()
    prompt = [number % 60 for number in range(80)]
    driver.add(make_request(1, prompt, max_tokens=1))
    driver.run()
    manager = driver.scheduler.memory
    assert manager.num_cached == 20
    for block_hash in list(manager.leader.pool.block_of_hash)[:10]:  # as if they had been evicted
        manager.leader.pool.forget(block_hash)
    driver.add(make_request(2, [*prompt, 61, 62], max_tokens=2))
    output = driver.begin()
    assert driver.items[0].start == 80 and manager.num_held == IN_WINDOW
    driver.finish(output)
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 80
    driver.check_idle()


def test_freed_blocks_leave_the_cache_too_when_numbers_are_not_finite() -> None:
    config = make_config(max_model_len=200)
    driver = Driver(config, 60, Faults(poisoned_seeds=(1,)), sliding_window=WINDOW)
    driver.add(make_request(1, [number % 60 for number in range(80)], max_tokens=5))  # in three steps
    driver.step()
    driver.step()
    assert driver.scheduler.memory.num_cached > 0
    driver.run().check_outputs()
    assert driver.ends[1].error == NOT_FINITE and driver.scheduler.memory.num_cached == 0
    driver.check_idle()


def test_a_preempted_sequence_computes_one_window_again() -> None:
    driver = driver_for()
    driver.add(make_request(1, [number % 60 for number in range(80)], max_tokens=30))
    for _ in range(10):
        driver.step()
    scheduler = driver.scheduler
    scheduler.requests.preempt(scheduler.requests.by_id[1], 0.0)
    scheduler.audit()
    driver.step()
    assert driver.items[0].start >= 80
    driver.run().check_outputs()
    driver.check_idle()
