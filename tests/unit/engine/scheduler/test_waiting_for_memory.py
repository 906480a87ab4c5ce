"""Sequences that wait for blocks, slots or a checkpoint: others yield to them or pass them, and waiting is cheap."""

import pytest

from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.policy import MAX_CONSIDERED
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import Driver, make_config, make_request

SIZE = 4
FULL, WINDOW = GroupInfo(41, 0), GroupInfo(41, 0, span=30)
SLOTS = GroupInfo(40, 0, is_recurrent=True)


def ids(number: int, count: int) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    return [number, *((number * 7 + index) % 64 for index in range(count - 1))]


def make_driver(*groups: GroupInfo, **config) -> Driver:
    sizes = {"max_model_len": 400, "block_size": SIZE, "max_num_batched_tokens": 64, "max_waiting_requests": 1000}
    return Driver(make_config(**{**sizes, **config}), groups=groups)


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Return a list that grows by one entry with each call of a method of `SequenceMemory`."""
    calls: list[int] = []
    method = getattr(SequenceMemory, name)
    monkeypatch.setattr(SequenceMemory, name, lambda self, *others: calls.append(1) or method(self, *others))
    return calls


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLOTS), (FULL, WINDOW), (FULL, WINDOW, SLOTS)])
def test_batch_requests_give_up_blocks_whatever_the_memory_of_the_model(groups: tuple[GroupInfo, ...]) -> None:
    driver = make_driver(*groups)
    for number in (1, 2, 3):
        driver.add(make_request(number, ids(number, 40), max_tokens=20, is_low_priority=True))
    for _ in range(6):
        driver.step()
    driver.add(make_request(9, ids(9, 100)))
    driver.step()
    driver.step()
    running = [seq.request_id for seq in driver.scheduler.requests.running]
    assert 9 in running and driver.scheduler.stats.num_preemptions > 0
    driver.run().check_outputs()
    driver.check_idle()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLOTS), (FULL, WINDOW, SLOTS)])
def test_a_refused_sequence_is_not_searched_again_in_every_step(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[GroupInfo, ...]
) -> None:
    searches = counted(monkeypatch, "find_prefix")
    driver = make_driver(*groups)
    driver.add(make_request(1, ids(1, 90), max_tokens=40))
    driver.step()
    driver.add(make_request(2, ids(2, 90)))
    for _ in range(30):
        driver.step()
    assert len(searches) == 2 and driver.scheduler.num_waiting == 1
    driver.run().check_outputs()
    assert len(searches) == 3
    driver.check_idle()


def test_many_equal_prompts_wait_for_a_checkpoint_at_the_cost_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried in the step that computes the first prompt, and in the next one, which runs ahead."""
    driver = make_driver(GroupInfo(2000, 0), SLOTS, max_num_batched_tokens=400, max_model_len=1000)
    prompt = ids(1, 300)
    for number in range(1, 301):
        driver.add(make_request(number, prompt))
    tried, searched = counted(monkeypatch, "allocate"), counted(monkeypatch, "find_prefix")
    output = driver.scheduler.schedule(0.0)
    assert output is not None and [item.seq.request_id for item in output.scheduled] == [1]
    assert len(tried) <= 1 + MAX_CONSIDERED and len(searched) <= 2 * len(tried)
    tried.clear()
    searched.clear()
    assert driver.scheduler.schedule(0.01, ahead=True) is not None
    assert 0 < len(tried) <= MAX_CONSIDERED and not searched


def test_a_wait_for_a_checkpoint_is_not_a_wait_for_blocks() -> None:
    driver = make_driver(GroupInfo(100, 0), SLOTS, max_num_batched_tokens=400)
    for number in (1, 2):
        driver.add(make_request(number, [*ids(1, 130), number]))
    driver.run().check_outputs()
    steps = driver.scheduler.requests.log.steps
    assert driver.scheduler.stats.prefix_cache_hits == 128 and (steps.without_row, steps.without_blocks) == (0, 0)


def test_a_short_prompt_behind_one_that_waits_for_a_checkpoint_is_served_soon() -> None:
    """The long prompt leaves a checkpoint where it parts from the first, and the third prompt waits for it."""
    driver = make_driver(GroupInfo(500, 0), SLOTS, max_num_batched_tokens=32, max_model_len=2000)
    shared = ids(1, 300)
    driver.add(make_request(1, [*shared, *ids(2, 20)], max_tokens=1))
    driver.run()
    driver.add(make_request(2, [*shared, *ids(3, 1000)]))
    driver.step()
    driver.add(make_request(3, [*shared, *ids(4, 30)]))
    driver.add(make_request(4, ids(5, 10)))
    for _ in range(3):
        driver.step()
    assert [seq.request_id for seq in driver.scheduler.requests.running] == [2, 4]
    driver.run().check_outputs()
    driver.check_idle()


def test_checkpoints_in_flight_do_not_keep_slots_from_a_sequence() -> None:
    """There are two slots for each sequence and no more, and each step saves two of 31 sequences that decode."""
    sizes = {"max_num_seqs": 32, "pipeline_depth": 2, "block_size": 16, "max_num_batched_tokens": 512}
    driver = make_driver(GroupInfo(1000, 0), GroupInfo(65, 0, is_recurrent=True), **sizes)
    for number in range(1, 32):
        driver.add(make_request(number, ids(number, 9 + number), max_tokens=300))
    for _ in range(30):
        driver.step()
    driver.add(make_request(99, ids(40, 12)))
    for _ in range(8):
        driver.step()
    assert 99 in driver.ends and driver.executor.states is not None
    num_saved = driver.executor.states.num_saved
    for _ in range(16):
        driver.step()
    assert driver.executor.states.num_saved > num_saved
